"""Pooling over windows of images, over all of an image, and to a size that is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from foreplan.base.arguments import whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.nn.windows import PerAxis, per_axis
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, takes_tensors, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.ops import pool
from foreplan.ops.index import gather
from foreplan.ops.reduce import reduce


@takes_tensors
def max_pool(
    x: Tensor,
    kernel: PerAxis,
    stride: PerAxis | None = None,
    padding: PerAxis = 0,
    dilation: PerAxis = 1,
) -> Tensor:
    """Maximum over windows of [N, C, *S]; the stride is the kernel's extent by default.

    Raises:
        ShapeError: no window fits into the padded images.
        UsageError: a size is not a whole number, or too small.
    """
    geometry = _windows("max_pool", x, kernel, stride, padding)
    gaps = per_axis("max_pool's dilation", dilation, x.ndim - 2)
    return wrap(pool.max_pool(current().at(), x.value, dilations=gaps, **geometry))


@takes_tensors
def avg_pool(
    x: Tensor,
    kernel: PerAxis,
    stride: PerAxis | None = None,
    padding: PerAxis = 0,
    count_padding: bool = False,
) -> Tensor:
    """Mean over windows of [N, C, *S]; the stride is the kernel's extent by default.

    Padding counts as zeros only with `count_padding`.

    Raises:
        ShapeError: no window fits into the padded images, or elements are not floating-point.
        UsageError: a size is not a whole number, or too small.
    """
    geometry = _windows("avg_pool", x, kernel, stride, padding)
    return wrap(pool.avg_pool(current().at(), x.value, count_include_pad=count_padding, **geometry))


class _Windows(TypedDict):
    """The arguments that poolings share, one entry for each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]


def _windows(kind: str, x: Tensor, kernel: PerAxis, stride: PerAxis | None, padding: PerAxis) -> _Windows:
    axes = x.ndim - 2
    taps = per_axis(f"{kind}'s kernel", kernel, axes)
    steps = taps if stride is None else per_axis(f"{kind}'s stride", stride, axes)
    return {"kernel": taps, "strides": steps, "pads": per_axis(f"{kind}'s padding", padding, axes, 0)}


@takes_tensors
def global_avg_pool(x: Tensor) -> Tensor:
    """Mean over all spatial axes: [N, C, *S] → [N, C]."""
    return wrap(reduce(current().at(), "mean", x.value, range(2, x.ndim)))


Size = int | None | Sequence[int | None]
_MOST_WINDOWS = 1 << 16  # along one axis


@takes_tensors
def adaptive_avg_pool(x: Tensor, size: Size) -> Tensor:
    """[N, C, *S] → [N, C, *size]: output i is the mean of the inputs from ⌊i·S/size⌋ up to ⌈(i + 1)·S/size⌉, which it
    leaves out. That is PyTorch's rule. Windows overlap where `size` does not divide S.

    Args:
        x: floating-point images.
        size: the new extent along each spatial axis, None for the axis as it is; one for all axes.

    Raises:
        ShapeError: `x` has no spatial axis, or the count of numbers is another one.
        UsageError: a size is not a whole number of at least 1.
    """
    wanted, b = _sizes("adaptive_avg_pool", x, size), current().at()
    if all(n == 1 for n in wanted):
        return wrap(reduce(b, "mean", x.value, range(2, x.ndim), keepdims=True))
    kernel = [n // m if n % m == 0 else 1 for n, m in zip(x.shape[2:], wanted)]
    y = wrap(pool.avg_pool(b, x.value, kernel)) if any(n > 1 for n in kernel) else x
    for axis, (before, after) in enumerate(zip(x.shape[2:], wanted), 2):
        if before % after:
            # The sums of all windows along an axis are one product with ones and zeros.
            members = np.zeros((before, after), y.dtype)
            starts, stops = _spans(before, after)
            for i, (start, stop) in enumerate(zip(starts, stops)):
                members[start:stop, i] = 1
            y = y.swapaxes(axis, -1) @ members / (stops - starts).astype(y.dtype)
            y = y.swapaxes(axis, -1)
    return y


@takes_tensors
def adaptive_max_pool(x: Tensor, size: Size) -> Tensor:
    """[N, C, *S] → [N, C, *size]: the maximum over the windows of `adaptive_avg_pool`.

    The gradient of a window goes to its first maximum. Arguments and errors are those of `adaptive_avg_pool`.
    """
    wanted, b = _sizes("adaptive_max_pool", x, size), current().at()
    y, kernel = x.value, []
    for axis, (before, after) in enumerate(zip(x.shape[2:], wanted), 2):
        if before % after == 0:
            kernel.append(before // after)
            continue
        # The windows stand side by side, all as wide as the widest: the others show their last element again.
        starts, stops = _spans(before, after)
        widest = int((stops - starts).max())
        places = np.minimum(starts[:, None] + np.arange(widest), stops[:, None] - 1)
        y = gather(b, y, as_tensor(places.reshape(-1)).value, axis)
        kernel.append(widest)
    return wrap(pool.max_pool(b, y, kernel)) if any(n > 1 for n in kernel) else wrap(y)


def _sizes(kind: str, x: Tensor, size: Size) -> tuple[int, ...]:
    """The extents after an adaptive pooling."""
    spatial = x.shape[2:]
    if not spatial:
        raise ShapeError(f"{kind} needs images [N, C, *S] with at least one spatial axis, and got {x!r}")
    given = list(size) if isinstance(size, Sequence | np.ndarray) else [size] * len(spatial)
    if len(given) != len(spatial):
        raise ShapeError(
            f"{kind}'s size has {len(given)} numbers for {len(spatial)} spatial axes; give one number, or one for "
            "each axis"
        )
    return tuple(n if m is None else whole(f"{kind}'s size", m, 1, _MOST_WINDOWS) for n, m in zip(spatial, given))


def _spans(before: int, after: int) -> tuple[np.ndarray, np.ndarray]:
    """First element of each window of an axis, and the one behind its last."""
    at = np.arange(after)
    return at * before // after, -(-(at + 1) * before // after)
