"""Kernels, strides, padding and sizes as layers take them: one number for all spatial axes, or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreplan.base.arguments import whole
from foreplan.base.errors import ShapeError
from foreplan.ops.window import same_padding

PerAxis = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]] | str


def per_axis(what: str, given: PerAxis, axes: int, least: int = 1) -> tuple[int, ...]:
    """One number for each spatial axis.

    Args:
        what: the argument's name in errors, such as `conv's kernel`.
        given: one number for all axes, or one for each.
        axes: number of spatial axes.
        least: the smallest number allowed.

    Raises:
        ShapeError: the count of numbers is another one.
        UsageError: a number is not whole, or too small.
    """
    if not isinstance(given, Iterable) or isinstance(given, str):
        return (whole(what, given, least),) * axes
    numbers = list(given)
    if len(numbers) != axes:
        raise ShapeError(
            f"{what} has {len(numbers)} numbers for {axes} spatial axes; give one number, or one for each axis"
        )
    return tuple(whole(what, number, least) for number in numbers)


def pads_per_axis(
    what: str, padding: Padding, spatial: Sequence[int], taps: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> list[tuple[int, int]]:
    """(low, high) for each spatial axis.

    Args:
        what: the argument's name in errors, such as `conv's padding`.
        padding: one number for all axes, a number or a pair for each, "valid" (none) or "same" (see `conv`).
        spatial: extents of the images.
        taps: the kernel's extents.
        steps: the strides.
        gaps: the dilations.

    Raises:
        ShapeError: the count of numbers is another one, or the word is not known.
        UsageError: a number is not whole, or negative.
    """
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ShapeError(f"{what} {padding!r} is not known; use numbers, 'same' or 'valid'")
        if padding == "valid":
            return [(0, 0)] * len(spatial)
        totals = [same_padding(*axis) for axis in zip(spatial, taps, steps, gaps)]
        return [(total // 2, total - total // 2) for total in totals]
    entries = list(padding) if isinstance(padding, Iterable) else [padding] * len(spatial)
    if len(entries) != len(spatial):
        raise ShapeError(f"{what} {padding} has {len(entries)} entries for {len(spatial)} spatial axes")
    pairs = [tuple(entry) if isinstance(entry, Iterable) else (entry, entry) for entry in entries]
    if any(len(pair) != 2 for pair in pairs):
        raise ShapeError(f"{what} {padding} must be numbers or pairs (low, high)")
    return [(whole(what, low, 0), whole(what, high, 0)) for low, high in pairs]
