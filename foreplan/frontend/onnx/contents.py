"""What the numbers of a tensor tell of it: tables, masks and scales that nobody has trained.

Few numbers are looked at, wherever they lie: of a large tensor at most 4,096, so that import stays as fast as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreplan.errors import ForeplanError
from foreplan.frontend.onnx.tensors import Constant, from_tensor
from foreplan.graph import Fill, Stored
from foreplan.graph.ir import Kind

if TYPE_CHECKING:
    import onnx

_SAMPLES = 4096
_FORBIDS = -1e4  # added to a score, it leaves nothing of a probability


def table_like(tensor: onnx.TensorProto, path: Path | None) -> str:
    """Why a tensor's numbers are none that training gives, for people; empty: they may well be trained."""
    try:
        flat = _numbers(from_tensor(tensor, tensor.name, path, tensor.name, Kind.CONSTANT))
    except (ForeplanError, OSError):
        return ""  # whoever reads it says what is wrong
    shape = tuple(tensor.dims)
    if flat is None or flat.size < 4:
        return ""
    some = _sample(flat)
    if np.isneginf(some).any() or (some.min() <= _FORBIDS and np.isin(some, (0.0, some.min())).all()):
        return "filled as masks are"
    if (some == some[0]).all():
        return ""
    if sum(extent != 1 for extent in shape) == 1:
        return _progression(some) if flat.size == some.size else ""
    if np.isin(_head(flat, shape), (0.0, 1.0)).all() and np.abs(some).max() <= 1.0 and _varies_smoothly(flat, shape):
        return "filled with sines and cosines"
    if (some >= 0).all() and np.count_nonzero(some) < some.size // 2:
        return "mostly zeros and nowhere negative, as filters and adjacencies are"
    if len(shape) == 2 and shape[0] == shape[1] and shape[0] > 3 and _is_symmetric(flat, shape[0]):
        return "symmetric, as no trained weight is"
    return ""


def is_one_number(tensor: onnx.TensorProto, path: Path | None) -> bool:
    """Whether a tensor holds zeros alone, or ones alone."""
    try:
        flat = _numbers(from_tensor(tensor, tensor.name, path, tensor.name, Kind.CONSTANT))
    except (ForeplanError, OSError):
        return False
    return flat is not None and flat.size > 0 and flat[0] in (0, 1) and bool((_sample(flat) == flat[0]).all())


def same_numbers(one: onnx.TensorProto, other: onnx.TensorProto, path: Path | None) -> bool:
    """Whether two matrices hold the same numbers, one of them perhaps transposed."""
    a, b = tuple(one.dims), tuple(other.dims)
    if len(a) != 2 or len(b) != 2 or one.data_type != other.data_type or b not in (a, a[::-1]) or 1 in a:
        return False
    try:
        x, y = (_numbers(from_tensor(each, each.name, path, each.name, Kind.CONSTANT)) for each in (one, other))
    except (ForeplanError, OSError):
        return False
    if x is None or y is None or not x.size:
        return False
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(0, a[0], _SAMPLES), rng.integers(0, a[1], _SAMPLES)
    some = x[rows * a[1] + columns]
    if (some == some[0]).all():
        return False
    places = [rows * a[1] + columns] if a == b else []
    places += [columns * a[0] + rows] if a[::-1] == b else []
    return any(bool((y[at] == some).all()) for at in places)


def _numbers(constant: Constant) -> np.ndarray | None:
    """The content in one row, read as far as it is looked at."""
    init = constant.init
    if constant.array is not None:
        return constant.array.reshape(-1)
    if isinstance(init, Fill):
        return None
    if isinstance(init, Stored):
        raw = np.memmap(init.path, np.uint8, "r", init.offset, (init.type.nbytes,))
        return raw.view(init.type.dtype.numpy)
    array = np.empty(constant.shape, constant.type.dtype.numpy)
    init.fill(array, np.random.default_rng(0))
    return array.reshape(-1)


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
    if flat.size > _SAMPLES:
        flat = flat[np.sort(np.random.default_rng(0).integers(0, flat.size, _SAMPLES))]
    return np.asarray(flat).astype(np.float64)


def _head(flat: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The first row of the last two axes."""
    return np.asarray(flat[: shape[-1]]).astype(np.float64)


def _varies_smoothly(flat: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether the second row of a table is the sine, the cosine, or both, of frequencies."""
    width = shape[-1]
    if shape[-2] < 3:
        return False
    first, second, third = (np.asarray(flat[i * width : (i + 1) * width]).astype(np.float64) for i in range(3))
    cosine = first == 1.0
    angle = np.where(cosine, np.arccos(np.clip(second, -1, 1)), np.arcsin(np.clip(second, -1, 1)))
    doubled = np.where(cosine, np.cos(2 * angle), np.sin(2 * angle))
    return bool(np.abs(np.abs(doubled) - np.abs(third)).max() < 1e-2)


def _is_symmetric(flat: np.ndarray, extent: int) -> bool:
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(0, extent, (2, _SAMPLES // 2))
    off = rows != columns
    return bool((flat[rows[off] * extent + columns[off]] == flat[columns[off] * extent + rows[off]]).all())
