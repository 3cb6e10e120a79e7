"""What the numbers of a tensor tell of it: tables, masks and scales that nobody has trained.

Few numbers are looked at: of a large tensor a few runs of them, so that its pages stay unread.
"""

from __future__ import annotations

import math
import mmap
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreplan.errors import ForeplanError
from foreplan.frontend.onnx.tensors import from_tensor
from foreplan.graph import Array, Stored
from foreplan.graph.ir import Kind

if TYPE_CHECKING:
    import onnx

_RUNS, _RUN = 64, 64  # of numbers that lie side by side
_PAIRS, _FIRST = 2048, 16  # of numbers that are compared; the first ones, which lie apart, tell nearly always
_BLOCK = 1 << 20  # of numbers that are compared at once
_DISTINCT = 0.95  # of many numbers in float32, some are equal by chance
_FEWEST = 5  # numbers that tell whether a rule gives them
_FEW, _UNLIKELY = 16, -50.0  # numbers of a mask; what is added to a score to forbid a place in practice
_FORBIDS = -1e4  # added to a score, it leaves nothing of a probability


def table_like(tensor: onnx.TensorProto, path: Path | None) -> str:
    """Why a tensor's numbers are none that training gives, for people; empty: they may well be trained."""
    flat, shape = _numbers(tensor, path), tuple(tensor.dims)
    if flat is None or flat.size < 4:
        return ""
    some = _sample(flat)
    if np.isneginf(some).any() or (some.min() <= _FORBIDS and np.isin(some, (0.0, some.min())).all()):
        return "filled as masks are"
    if (some == some[0]).all():
        return ""
    if sum(extent != 1 for extent in shape) == 1:
        return _progression(some) if flat.size == some.size else ""
    if np.abs(some).max() <= 1.0 and _is_sinusoid(flat, shape):
        return "filled with sines and cosines"
    if (some >= 0).all() and np.count_nonzero(some) < some.size // 2:
        return "mostly zeros and nowhere negative, as filters and adjacencies are"
    if len(shape) == 2 and shape[0] == shape[1] and shape[0] > 3 and _is_symmetric(flat, shape[0]):
        return "symmetric, as no trained weight is"
    return ""


def is_one_number(tensor: onnx.TensorProto, path: Path | None) -> bool:
    """Whether a tensor holds zeros alone, or ones alone."""
    flat = _numbers(tensor, path)
    return flat is not None and flat.size > 0 and flat[0] in (0, 1) and bool((_sample(flat) == flat[0]).all())


class Layout(Enum):
    """How a tensor's numbers lie in another one."""

    SAME = "as they are"
    TURNED = "with rows for columns"
    REPEATED = "once for each place of the axes before its own"


def is_irregular(tensor: onnx.TensorProto, path: Path | None) -> bool:
    """Whether the numbers are as training leaves them: hardly two are equal, and no rule gives one from the other."""
    flat, shape = _numbers(tensor, path), tuple(tensor.dims)
    if flat is None or flat.size < _FEWEST or table_like(tensor, path):
        return False
    some = _sample(flat)
    if np.unique(some).size < _DISTINCT * some.size or not np.isfinite(some).all():
        return False
    steps = np.diff(some[: shape[-1]]) if shape[-1] > 1 else np.diff(some)
    return not ((steps > 0).all() or (steps < 0).all() or _is_on_circles(flat, shape[-1]))


def differs_by_head(tensor: onnx.TensorProto, path: Path | None) -> bool:
    """Whether what is added to scores [..., heads, queries, keys] was learned: masks, and biases that distances give,
    have few numbers, forbid places, or are the same in each head but for a factor.
    """
    flat, shape = _numbers(tensor, path), tuple(tensor.dims)
    if flat is None or len(shape) < 3 or math.prod(shape[:-2]) < 2 or not flat.size:
        return False
    heads = np.asarray(flat[: 2 * shape[-2] * shape[-1]]).astype(np.float64).reshape(2, -1)
    lengths = np.linalg.norm(heads, axis=1)
    if not np.isfinite(lengths).all() or heads.min() <= _UNLIKELY or not lengths.all():
        return False
    return np.unique(heads).size > _FEW and abs(float(heads[0] @ heads[1])) < 0.99 * float(lengths.prod())


def ends(tensor: onnx.TensorProto, path: Path | None) -> tuple[float, float] | None:
    """The first number and the last one; None: they cannot be read."""
    flat = _numbers(tensor, path)
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
    x, y = _numbers(one, path), _numbers(other, path)
    if one.data_type != other.data_type or x is None or y is None or not x.size or not y.size:
        return None
    layouts = [Layout.SAME] if a == b else []
    if len(a) == 2 and a[::-1] == b and 1 not in a:
        layouts.append(Layout.TURNED)
    if a and a != b and b[len(b) - len(a) :] == a:
        layouts.append(Layout.REPEATED)
    some = np.random.default_rng(0).integers(0, y.size, _PAIRS)
    if (y[some] == y[some[0]]).all():
        return None
    blocks = [some]
    if whole:
        blocks += [np.arange(start, min(start + _BLOCK, y.size)) for start in range(0, y.size, _BLOCK)]
    return next((layout for layout in layouts if all(_agree(x, _place(layout, at, a), y, at) for at in blocks)), None)


def _place(layout: Layout, at: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """Where the numbers of one tensor are that make up places of another one."""
    if layout is Layout.TURNED:
        rows, columns = dims
        return at % rows * columns + at // rows
    return at % math.prod(dims)


def _numbers(tensor: onnx.TensorProto, path: Path | None) -> np.ndarray | None:
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


def _agree(x: np.ndarray, at_x: np.ndarray, y: np.ndarray, at_y: np.ndarray) -> bool:
    """Whether two rows hold the same numbers at places of each."""
    ends = slice(_FIRST), slice(_FIRST, None)
    return all(bool((x[at_x[end]] == y[at_y[end]]).all()) for end in ends)


def _progression(row: np.ndarray) -> str:
    """Why a vector is none that training gives: places, frequencies, windows."""
    steps = np.diff(row)
    if steps[0] and np.allclose(steps, steps[0], rtol=1e-3, atol=0):
        return "evenly spaced, as places are"
    if (row > 0).all() and np.allclose(row[1:] / row[:-1], row[1] / row[0], rtol=1e-3, atol=0):
        return "a geometric series, as frequencies are"
    if row.size > 4 and any(np.allclose(part, part[::-1], rtol=1e-5, atol=1e-7) for part in (row, row[1:])):
        return "symmetric, as windows are"
    return ""


def _sample(flat: np.ndarray) -> np.ndarray:
    """Numbers from all over a row, in float64."""
    if flat.size > _RUNS * _RUN:
        starts = np.sort(np.random.default_rng(0).integers(0, flat.size - _RUN, _RUNS))
        flat = np.concatenate([flat[start : start + _RUN] for start in starts])
    return np.asarray(flat).astype(np.float64)


def _is_sinusoid(flat: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether the first rows of a table are sines, cosines, or both, of 0, 1 and 2 times some frequencies."""
    width = shape[-1]
    if shape[-2] < 3 or not np.isin(flat[:width].astype(np.float64), (0.0, 1.0)).all():
        return False
    first, second, third = (np.asarray(flat[i * width : (i + 1) * width]).astype(np.float64) for i in range(3))
    cosine = first == 1.0
    angle = np.where(cosine, np.arccos(np.clip(second, -1, 1)), np.arcsin(np.clip(second, -1, 1)))
    doubled = np.where(cosine, np.cos(2 * angle), np.sin(2 * angle))
    return bool(np.abs(np.abs(doubled) - np.abs(third)).max() < 1e-2)


def _is_on_circles(flat: np.ndarray, width: int) -> bool:
    """Whether pairs of columns are the sine and the cosine of one angle, side by side or half a row apart."""
    if width < 2 or width % 2:
        return False
    rows = np.asarray(flat[: width * min(len(flat) // width, _RUN)]).astype(np.float64).reshape(-1, width)
    for squares in (rows[:, ::2] ** 2 + rows[:, 1::2] ** 2, rows[:, : width // 2] ** 2 + rows[:, width // 2 :] ** 2):
        if squares.max() - squares.min() < 1e-3 * squares.max():
            return True
    return False


def _is_symmetric(flat: np.ndarray, extent: int) -> bool:
    rows, columns = np.random.default_rng(0).integers(0, extent, (2, _PAIRS))
    rows, columns = rows[rows != columns], columns[rows != columns]
    return _agree(flat, rows * extent + columns, flat, columns * extent + rows)
