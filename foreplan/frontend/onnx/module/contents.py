"""The numbers of a tensor, and how they lie in another one.

Few numbers are looked at: of a large tensor a few runs of them, so that its pages stay unread.
"""

from __future__ import annotations

import math
import mmap
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreplan.base.errors import ForeplanError
from foreplan.frontend.onnx.tensors import FLOATS, from_tensor
from foreplan.graph import Array, Stored
from foreplan.graph.value import Kind

if TYPE_CHECKING:
    import onnx

_RUNS, _RUN = 64, 64  # of numbers that lie side by side
_PAIRS, _FIRST = 2048, 16  # of numbers that are compared; the first ones, which lie apart, tell nearly always
_BLOCK = 1 << 20  # of numbers that are compared at once
_FEW, _UNLIKELY = 16, -50.0  # numbers of a mask; what is added to a score to forbid a place in practice


def is_zeros_or_ones(tensor: onnx.TensorProto, path: Path | None) -> bool:
    """Whether a tensor holds zeros alone, or ones alone."""
    flat = numbers_of(tensor, path)
    return flat is not None and flat.size > 0 and flat[0] in (0, 1) and bool((sample(flat) == flat[0]).all())


def uniform_value(tensor: onnx.TensorProto, path: Path | None) -> float | None:
    """The number that stands everywhere in a tensor of floats; None: there are several, or it cannot be read."""
    if tensor.data_type not in FLOATS or 0 in tensor.dims:
        return None
    flat = numbers_of(tensor, path)
    if flat is None or not (flat[:_FIRST] == flat[0]).all():
        return None
    return float(flat[0]) if (sample(flat) == flat[0]).all() else None


class Layout(Enum):
    """How a tensor's numbers lie in another one."""

    SAME = "as they are"
    TRANSPOSED = "with rows for columns"
    REPEATED = "once for each place of the axes before its own"


def differs_by_head(tensor: onnx.TensorProto, path: Path | None) -> bool:
    """Whether what is added to scores [..., heads, queries, keys] was learned: masks, and biases that distances give,
    have few numbers, forbid places, or are the same in each head but for a factor.
    """
    flat, shape = numbers_of(tensor, path), tuple(tensor.dims)
    if flat is None or len(shape) < 3 or math.prod(shape[:-2]) < 2 or not flat.size:
        return False
    heads = np.asarray(flat[: 2 * shape[-2] * shape[-1]]).astype(np.float64).reshape(2, -1)
    lengths = np.linalg.norm(heads, axis=1)
    if not np.isfinite(lengths).all() or heads.min() <= _UNLIKELY or not lengths.all():
        return False
    return np.unique(heads).size > _FEW and abs(float(heads[0] @ heads[1])) < 0.99 * float(lengths.prod())


def first_and_last(tensor: onnx.TensorProto, path: Path | None) -> tuple[float, float] | None:
    """The first number and the last one; None: they cannot be read."""
    flat = numbers_of(tensor, path)
    return None if flat is None or not flat.size else (float(flat[0]), float(flat[-1]))


def layout_in(one: onnx.TensorProto, other: onnx.TensorProto, path: Path | None, whole: bool = False) -> Layout | None:
    """How the numbers of one tensor make up another one; None: they do not, or all of them are equal.

    Args:
        one: whose numbers they may be.
        other: what may be made up of them.
        path: the file, beside which contents lie.
        whole: compare all numbers, instead of a few of a large tensor.
    """
    a, b = tuple(one.dims), tuple(other.dims)
    x, y = numbers_of(one, path), numbers_of(other, path)
    if one.data_type != other.data_type or x is None or y is None or not x.size or not y.size:
        return None
    layouts = [Layout.SAME] if a == b else []
    if len(a) == 2 and a[::-1] == b and 1 not in a:
        layouts.append(Layout.TRANSPOSED)
    if a and a != b and b[len(b) - len(a) :] == a:
        layouts.append(Layout.REPEATED)
    some = np.random.default_rng(0).integers(0, y.size, _PAIRS)
    if (y[some] == y[some[0]]).all():
        return None
    blocks = [some]
    if whole:
        blocks += [np.arange(start, min(start + _BLOCK, y.size)) for start in range(0, y.size, _BLOCK)]
    return next((layout for layout in layouts if all(equal_at(x, _place(layout, at, a), y, at) for at in blocks)), None)


def _place(layout: Layout, at: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """Where the numbers of one tensor are that make up places of another one."""
    if layout is Layout.TRANSPOSED:
        rows, columns = dims
        return at % rows * columns + at // rows
    return at % math.prod(dims)


def numbers_of(tensor: onnx.TensorProto, path: Path | None) -> np.ndarray | None:
    """The content in one row, read as far as it is looked at; None: it cannot be read, as whoever needs it says."""
    try:
        constant = from_tensor(tensor, tensor.name, path, tensor.name, Kind.CONSTANT)
        init = constant.init
        if isinstance(init, Stored):
            raw = np.memmap(init.path, np.uint8, "r", init.offset, (init.type.nbytes,))
            raw.base.madvise(mmap.MADV_RANDOM)  # type: ignore[union-attr]  # pages around what is read stay unread
            return raw.view(init.type.dtype.numpy)
    except (ForeplanError, OSError):
        return None
    assert isinstance(init, Array)
    return init.array.reshape(-1)


def equal_at(x: np.ndarray, at_x: np.ndarray, y: np.ndarray, at_y: np.ndarray) -> bool:
    """Whether two rows hold the same numbers at places of each."""
    ends = slice(_FIRST), slice(_FIRST, None)
    return all(bool((x[at_x[end]] == y[at_y[end]]).all()) for end in ends)


def sample(flat: np.ndarray) -> np.ndarray:
    """Numbers from all over a row, in float64."""
    if flat.size > _RUNS * _RUN:
        starts = np.sort(np.random.default_rng(0).integers(0, flat.size - _RUN, _RUNS))
        flat = np.concatenate([flat[start : start + _RUN] for start in starts])
    return np.asarray(flat).astype(np.float64)
