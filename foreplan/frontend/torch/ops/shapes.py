"""ATen ops that move elements: views, joins, margins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.elementwise import broadcast
from foreplan.frontend.torch.places import spliced
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.ops.join import pad
from foreplan.ops.shape import slice_axis


@aten("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "ravel", views=True)
@aten("reshape_as", "_reshape_alias", views=True)
def _view(c: Call, x: Any, *_: Any, **__: Any) -> Any:
    tensor = c.tensor(x)
    if c.dtype.itemsize != tensor.value.dtype.itemsize or c.dtype.category != tensor.value.dtype.category:
        raise UnsupportedError("a view of the same bytes as another element type")
    return tensor.reshape(c.shape)


@aten("transpose", "swapaxes", "swapdims", views=True)
def _transpose(c: Call, x: Any, i: int, j: int) -> Any:
    tensor = c.tensor(x)
    return tensor.swapaxes(i, j) if tensor.ndim else tensor


@aten("t", "numpy_T", "matrix_H", "mT", "mH", "adjoint", "T", views=True)
def _t(c: Call, x: Any) -> Any:
    tensor = c.tensor(x)
    if c.name in ("numpy_T", "T"):
        return tensor.T
    return tensor if tensor.ndim < 2 else tensor.mT


@aten("permute", "permute_copy", views=True)
def _permute(c: Call, x: Any, dims: Sequence[int]) -> Any:
    tensor = c.tensor(x)
    return tensor.transpose(*(d % tensor.ndim for d in dims)) if tensor.ndim else tensor


@aten("movedim", "moveaxis", views=True)
def _movedim(c: Call, x: Any, source: Any, target: Any) -> Any:
    tensor: Any = c.tensor(x)
    return np.moveaxis(tensor, source, target)


@aten("expand", "expand_as", "broadcast_to", views=True)
def _expand(c: Call, x: Any, *_: Any, **__: Any) -> Tensor:
    return broadcast(c.tensor(x), c.shape)


@aten("broadcast_tensors")
def _broadcast_tensors(c: Call, xs: Sequence[Any]) -> list[Tensor]:
    return [broadcast(c.tensor(x), tuple(like.shape)) for x, like in zip(xs, c.result)]


@aten("meshgrid")
def _meshgrid(c: Call, xs: Sequence[Any], indexing: str = "ij") -> list[Any]:
    tensors: list[Any] = [c.tensor(x) for x in xs]
    return list(np.meshgrid(*tensors, indexing=indexing))  # type: ignore[call-overload]


@aten("slice", views=True)
def _slice(c: Call, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    tensor = c.tensor(x)
    axis = as_axis(dim, tensor.ndim)
    places = range(*slice(start, end, step).indices(tensor.shape[axis]))
    return c.wrap(slice_axis(c.b, tensor.value, axis, places.start if places else 0, len(places), step))


@aten("narrow", views=True)
def _narrow(c: Call, x: Any, dim: int, start: int, length: int) -> Tensor:
    tensor = c.tensor(x)
    axis = as_axis(dim, tensor.ndim)
    return c.wrap(slice_axis(c.b, tensor.value, axis, start % max(1, tensor.shape[axis]), length))


@aten("select", views=True)
def _select(c: Call, x: Any, dim: int, index: int) -> Any:
    tensor = c.tensor(x)
    axis = as_axis(dim, tensor.ndim)
    return c.wrap(slice_axis(c.b, tensor.value, axis, index % tensor.shape[axis], 1)).reshape(c.shape)


@aten("diagonal", views=True)
def _diagonal(c: Call, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return c.tensor(x).diagonal(offset, dim1, dim2)


@aten("unfold", views=True)
def _unfold(c: Call, x: Any, dim: int, size: int, step: int) -> Any:
    tensor = c.tensor(x)
    axis = as_axis(dim, tensor.ndim)
    starts = np.arange(0, tensor.shape[axis] - size + 1, step)
    windows: Any = np.take(tensor, (starts[:, None] + np.arange(size)).reshape(-1), axis=axis)
    parted = windows.reshape(*tensor.shape[:axis], len(starts), size, *tensor.shape[axis + 1 :])
    return np.moveaxis(parted, axis + 1, -1)


def pieces(c: Call, x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Neighbouring parts of an axis."""
    axis = as_axis(dim, x.ndim)
    starts = np.cumsum([0, *sizes]).tolist()
    return [c.wrap(slice_axis(c.b, x.value, axis, start, n)) for start, n in zip(starts, sizes)]


@aten("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split", views=True)
def _split(c: Call, x: Any, _: Any, dim: int = 0) -> list[Tensor]:
    return pieces(c, c.tensor(x), [like.shape[dim] for like in c.result], dim)


@aten("unbind", views=True)
def _unbind(c: Call, x: Any, dim: int = 0) -> list[Any]:
    return [part.reshape(tuple(c.result[0].shape)) for part in pieces(c, c.tensor(x), [1] * len(c.result), dim)]


@aten("cat", "concat", "concatenate")
def _cat(c: Call, xs: Sequence[Any], dim: int = 0) -> Any:
    parts = [convert(c.tensor(x), c.dtype) for x in xs]
    kept = [part for part in parts if part.shape != (0,)]
    return np.concatenate(kept, axis=dim) if kept else parts[0]


@aten("stack")
def _stack(c: Call, xs: Sequence[Any], dim: int = 0) -> Any:
    return np.stack([convert(c.tensor(x), c.dtype) for x in xs], axis=dim)


@aten("repeat", "tile")
def _repeat(c: Call, x: Any, repeats: Sequence[int]) -> Any:
    return np.tile(c.tensor(x), tuple(repeats))


@aten("repeat_interleave")
def _interleave(c: Call, x: Any, repeats: Any = None, dim: int | None = None, output_size: Any = None) -> Any:
    if isinstance(repeats, Tensor):
        raise UnsupportedError("repeat_interleave by a tensor gives a shape that depends on data")
    times = repeats if not isinstance(repeats, np.ndarray) else repeats.tolist()
    if isinstance(times, list) and len(times) > 1:
        tensor = c.tensor(x)
        axis = 0 if dim is None else as_axis(dim, tensor.ndim)
        flat = tensor.reshape(-1) if dim is None else tensor
        return np.take(flat, np.repeat(np.arange(flat.shape[axis]), times), axis=axis)
    return np.repeat(c.tensor(x), times[0] if isinstance(times, list) else times, axis=dim)


@aten("roll")
def _roll(c: Call, x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    tensor = c.tensor(x)
    if not dims:
        return np.roll(tensor, next(iter(shifts)))
    return np.roll(tensor, tuple(shifts), tuple(dims))


@aten("flip", "fliplr", "flipud")
def _flip(c: Call, x: Any, dims: Sequence[int] | None = None) -> Any:
    axes = {"fliplr": (1,), "flipud": (0,)}.get(c.name) or tuple(dims or ())
    return np.flip(c.tensor(x), axes) if axes else c.tensor(x)


@aten("tril", "triu")
def _triangle(c: Call, x: Any, diagonal: int = 0) -> Any:
    rows, columns = c.shape[-2:]
    keep = (np.tril if c.name.startswith("tril") else np.triu)(np.ones((rows, columns), bool), diagonal)
    return np.where(keep, c.tensor(x), False if c.dtype.category == "bool" else 0)


@aten("diag", "diagflat", "diag_embed")
def _diag(c: Call, x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    tensor = c.tensor(x)
    if c.name == "diag_embed":
        if (dim1 % (tensor.ndim + 1), dim2 % (tensor.ndim + 1)) != (tensor.ndim - 1, tensor.ndim):
            raise UnsupportedError("diag_embed along other axes than the last two")
        n = tensor.shape[-1] + abs(offset)
        rows = np.arange(tensor.shape[-1]) + max(0, -offset)
        place = np.full((n, n), tensor.shape[-1])
        place[rows, rows + offset] = np.arange(tensor.shape[-1])
        zero = convert(c.tensor(np.zeros((*tensor.shape[:-1], 1), np.float32)), c.dtype)
        wide: Any = np.concatenate([tensor, zero], axis=-1)
        return wide[..., place]
    return (np.diag if c.name == "diag" else np.diagflat)(tensor, offset)


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@aten("pad", "constant_pad_nd")
def _pad(c: Call, x: Any, pads: Sequence[int], mode: Any = "constant", value: Any = None) -> Tensor:
    if not isinstance(mode, str):
        mode, value = "constant", mode
    return margins(c, c.tensor(x), pads, mode, value or 0)


@aten("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def _reflection(c: Call, x: Any, pads: Sequence[int]) -> Tensor:
    return margins(c, c.tensor(x), pads, "reflect")


@aten("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _replication(c: Call, x: Any, pads: Sequence[int]) -> Tensor:
    return margins(c, c.tensor(x), pads, "replicate")


def margins(c: Call, x: Tensor, pads: Sequence[int], mode: str, value: float = 0) -> Tensor:
    """Margins around the last axes, as PyTorch lists them: the last axis first; negative ones are cut off."""
    pairs = list(zip(pads[::2], pads[1::2]))[::-1]
    around = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if mode in ("replicate", "reflect") and min(pads) < 0:
        return _read_beyond(x, around, mode)
    inner = x.value
    for axis, (low, high) in enumerate(around):
        if low < 0 or high < 0:
            inner = slice_axis(c.b, inner, axis, max(0, -low), inner.shape[axis] + min(low, 0) + min(high, 0))
    wide = [(max(low, 0), max(high, 0)) for low, high in around]
    return c.wrap(pad(c.b, inner, wide, float(value), _MODES[mode])) if any(map(any, wide)) else c.wrap(inner)


def _read_beyond(x: Tensor, around: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Margins of which some are cut off: each place of the result is one of the tensor's own, counted from there."""
    found: Any = x
    for axis, (low, high) in enumerate(around):
        if low or high:
            n = x.shape[axis]
            places = np.arange(-low, n + high)
            places = places.clip(0, n - 1) if mode == "replicate" else n - 1 - np.abs(n - 1 - np.abs(places))
            found = np.take(found, places, axis=axis)
    return as_tensor(found)


@aten("pixel_shuffle", "pixel_unshuffle")
def _pixels(c: Call, x: Any, factor: int) -> Tensor:
    from foreplan.frontend import nn

    return getattr(nn, c.name)(c.tensor(x), factor)


@aten("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(c: Call, x: Any, groups: int) -> Any:
    n, channels, *rest = c.shape
    return c.tensor(x).reshape(n, groups, channels // groups, *rest).swapaxes(1, 2).reshape(c.shape)


@aten("as_strided", views=True)
def _as_strided(c: Call, x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = 0) -> Any:
    places = np.full(tuple(size), offset or 0, np.int64)
    for axis, (n, step) in enumerate(zip(size, stride)):
        places += (np.arange(n) * step).reshape(-1, *[1] * (len(size) - axis - 1))
    return as_tensor(c.tensor(x).reshape(-1)[places])


@aten("diagonal_scatter")
def _diagonal_scatter(c: Call, x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    places = np.arange(math.prod(c.shape)).reshape(c.shape)
    seen = np.diagonal(places, offset, dim1, dim2)
    return spliced(c.tensor(x), c.tensor(source, c.dtype), seen.reshape(-1))
