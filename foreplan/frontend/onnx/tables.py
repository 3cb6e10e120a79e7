"""Tables that a formula made, told by their numbers: waves, windows, filters, places, masks.

Training leaves noise in every number. So each test here asks for a rule that the numbers keep and that noise breaks.
The shape of a tensor proves nothing: waves are looked for along each of its axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from foreplan.frontend.onnx.module.contents import equal_at, numbers_of, sample
from foreplan.frontend.onnx.places import has_few_digits

if TYPE_CHECKING:
    import onnx

Shape = tuple[int, ...]
_FORBIDS = -1e4  # added to a score, it leaves nothing of a probability
_MOST, _APART = 512, 64  # numbers of a row that are looked at; of one whose numbers lie apart in a large file
_LARGE = 1 << 20  # numbers of a tensor whose pages stay unread where they can
_ROWS, _FIRST = 16, 4  # rows of a tensor that are looked at, and how many are enough to say no
_SHORT, _LONG = 5, 60  # the fewest numbers that show a wave, and a wave within a window
_MAIN = 8  # places beside the highest one over which the spectrum of a wave within a window spreads
_STRAY = 1e-4  # of the energy of such a row may lie elsewhere
_HOLD, _MOSTLY = 0.7, 0.8  # of a row's numbers, and of the rows, keep the rule: waves end, and others begin
_STEPS = 0.2  # of the way that a wave goes up and down lies in its shorter steps
_MANY = 16  # numbers that are whole by no chance, and in no small model that was written by hand
_TURNS = 2  # from rising to falling and back; curves that are no waves have fewer
_SMOOTH = 0.05  # of the range of a curve of many points is the most that it bends from one to the next
_PAIRS = 2048  # of numbers that are compared
_DISTINCT = 0.95  # of many numbers in float32, some are equal by chance


@np.errstate(all="ignore")
def table_like(tensor: onnx.TensorProto, path: Path | None, fresh: bool = False) -> str:
    """Why a tensor's numbers are none that training gives, for people; empty: they may well be trained.

    Args:
        fresh: whether it may well be a parameter that nobody has trained yet. Some begin with straight lines and smooth
            curves, as those of state spaces and of RWKV.
    """
    flat, shape = numbers_of(tensor, path), tuple(tensor.dims)
    if flat is None or flat.size < 4:
        return ""
    some = sample(flat)
    if _forbids(some):
        return "filled as masks are"
    if (some == some[0]).all() or not np.isfinite(some).all():
        return ""
    whole = flat.dtype.kind in "iu"  # of a quantised tensor
    if not whole and _is_countable(some):
        return "whole and half numbers, as places are"
    noise = 1 / float(np.abs(some).max()) if whole else _rounding(some)
    if sum(extent != 1 for extent in shape) == 1:
        first = (flat.size - some.size) // 2
        return _vector(np.asarray(flat[first : first + some.size]).astype(np.float64), noise, fresh)
    if (some >= 0).all() and _SHORT <= np.count_nonzero(some) < some.size // 2:
        return "mostly zeros and nowhere negative, as filters and adjacencies are"
    if len(shape) == 2 and shape[0] == shape[1] and shape[0] > 3 and _is_symmetric(flat, shape[0]):
        return "symmetric, as no trained weight is"
    fresh = fresh and not (_is_on_circles(flat, shape[-1]) or _begins_at_zero(flat, shape))
    if any(_are_waves(flat, shape, axis, noise, fresh) for axis in reversed(range(len(shape)))):
        return "filled with sines and cosines"
    if len(shape) > 2 and shape[1] == 1 and _are_mirrored(flat, shape, noise):
        return "each kernel is the mirror image of one, as filters are"
    return ""


def _forbids(some: np.ndarray) -> bool:
    """Whether numbers are those of a mask. Of a learned bias with a row of -inf for padding, hardly two are equal."""
    if np.isneginf(some).any():
        others = some[~np.isneginf(some)]
        return np.unique(others).size <= _DISTINCT * others.size
    return bool(some.min() <= _FORBIDS and np.isin(some, (0.0, some.min())).all())


@np.errstate(all="ignore")
def is_written(tensor: onnx.TensorProto, path: Path | None) -> bool:
    """Whether all of a few different numbers have few digits, as those that people write."""
    flat = numbers_of(tensor, path)
    if flat is None or not 2 < flat.size <= _APART or _rounding(np.asarray(flat).astype(np.float64)) > 2.0**-23:
        return False
    return np.unique(flat).size > 2 and all(has_few_digits(float(number)) for number in flat)


def _rounding(some: np.ndarray) -> float:
    """How far numbers may be from those that were meant, as a part of each: they may have been kept in few bits."""
    with np.errstate(over="ignore", under="ignore"):
        for dtype in (ml_dtypes.bfloat16, np.float16):
            if (some.astype(dtype).astype(np.float64) == some).all():
                return float(ml_dtypes.finfo(dtype).eps)
    return 2.0**-23


@np.errstate(all="ignore")
def is_irregular(tensor: onnx.TensorProto, path: Path | None) -> bool:
    """Whether the numbers are as training leaves them: hardly two are equal, and no rule gives one from the other."""
    flat, shape = numbers_of(tensor, path), tuple(tensor.dims)
    if flat is None or flat.size < _SHORT or table_like(tensor, path):
        return False
    some = sample(flat)
    if np.unique(some).size < _DISTINCT * some.size or not np.isfinite(some).all():
        return False
    steps = np.diff(some[: shape[-1]]) if shape[-1] >= _SHORT else np.diff(some)
    return not ((steps > 0).all() or (steps < 0).all() or _is_on_circles(flat, shape[-1]))


def _is_countable(some: np.ndarray) -> bool:
    """Whether all of many are whole or half numbers, and more than the -1, 0 and 1 of a weight in two bits."""
    return some.size >= _MANY and bool(
        np.abs(some).max() >= 2 and (2 * some == np.round(2 * some)).all() and np.unique(some).size > 2
    )


def _vector(row: np.ndarray, noise: float, fresh: bool) -> str:
    """Why a vector is none that training gives: places, frequencies, windows."""
    steps, high = np.diff(row), float(np.abs(row).max())
    if np.ptp(row) <= 64 * noise * high:
        return ""
    slack = 2 * noise * high if row.size > 4 else 0.0
    if steps[0] and np.allclose(steps, steps.mean(), rtol=1e-3, atol=slack):
        return "evenly spaced, as places are"
    if (row > 0).all():
        ratios = row[1:] / row[:-1]
        ratio = float(np.median(ratios))
        near = np.abs(ratios - ratio) <= max(1e-2 * abs(ratio - 1), 2 * noise * ratio)
        if near.mean() >= (_MOSTLY if row.size > 8 else 1):
            return "a geometric series, as frequencies are"
    near = max(1e-5, 2 * noise) * high
    parts = [part for part in (row, row[1:], _trimmed(row)) if part.size > 4 and np.unique(part).size > 2]
    if any(np.allclose(part, part[::-1], rtol=0, atol=near) for part in parts):
        return "symmetric, as windows are"
    if row.size >= 32 and not fresh and np.abs(np.diff(steps)).max() <= _SMOOTH * np.ptp(row):
        return "a smooth curve, as windows and grids are"
    return "filled with sines and cosines" if row.size >= 2 * _SHORT and _is_wave(row[:_MOST], noise, fresh) else ""


def _are_waves(flat: np.ndarray, shape: Shape, axis: int, noise: float, fresh: bool) -> bool:
    """Whether the rows along an axis are waves, as those of transforms and of positions are."""
    if shape[axis] < _SHORT:
        return False
    found = []
    for row in _rows(flat, shape, axis):
        wave = _is_wave(row, noise, fresh)
        found += [] if wave is None else [wave]
        if len(found) >= _FIRST and not any(found):
            return False
    return len(found) > 1 and sum(found) >= _MOSTLY * len(found)


def _rows(flat: np.ndarray, shape: Shape, axis: int) -> Iterator[np.ndarray]:
    """Some rows along an axis. Those whose numbers lie apart lie beside each other, so that few pages are read."""
    stride = int(np.prod(shape[axis + 1 :], dtype=np.int64))
    length = min(shape[axis], _MOST if stride == 1 or flat.size < _LARGE else _APART)
    count, within = flat.size // shape[axis], np.arange(length) + (shape[axis] - length) // 2
    first = 0 if stride == 1 else min(count // 3, count - 1)
    chosen = np.linspace(0, count - 1, min(count, _ROWS)).astype(np.int64)
    if stride > 1:
        chosen = np.arange(first, min(first + _ROWS, count))
    for row in np.random.default_rng(0).permutation(chosen):
        start = row // stride * stride * shape[axis] + row % stride
        yield np.asarray(flat[start + within * stride]).astype(np.float64)


def _is_wave(row: np.ndarray, noise: float, fresh: bool = False) -> bool | None:
    """Whether a row is a sine, or one within a window; None: it is too short or too even to tell.

    A line or a curve passes for a part of a slow sine; where it may be `fresh`, it tells nothing.
    """
    row = _trimmed(row)
    if row.size < _SHORT or np.ptp(row) <= max(1e-2, 64 * noise) * np.abs(row).max():
        return None
    steps = np.sign(np.diff(row))
    if fresh and np.count_nonzero(np.diff(steps[steps != 0])) < _TURNS:
        return None
    once = row[np.flatnonzero(np.diff(row, prepend=np.nan))]  # a wave along another axis repeats its numbers along this
    if once.size < _SHORT:
        return None
    return _recurs(row, noise) or (once.size < row.size and _recurs(once, noise)) or _is_narrow(row)


def _trimmed(row: np.ndarray) -> np.ndarray:
    """A row without the zeros before and behind."""
    held = np.flatnonzero(row)
    return row[held[0] : held[-1] + 1] if held.size else row[:0]


def _recurs(row: np.ndarray, noise: float) -> bool:
    """Whether x[n-1] + x[n+1] = 2 cos(w) x[n], as of each sampled sine of one frequency w."""
    middle, around, high = row[1:-1], row[:-2] + row[2:], np.abs(row).max()
    tells, steps = np.abs(middle) > 0.3 * high, np.sort(np.abs(np.diff(row)))
    if not tells.any() or steps[: int(_MOSTLY * steps.size)].sum() < _STEPS * steps.sum():
        return False
    factor = float(np.median(around[tells] / middle[tells]))
    off = np.abs(around - factor * middle) <= max(3e-3 * np.ptp(row), 2 * noise * high)
    return abs(factor) <= 2.01 and bool(off.mean() >= _HOLD)


def _is_narrow(row: np.ndarray) -> bool:
    """Whether the spectrum is that of one frequency, spread by a window; a window of our own leaves 1e-9 elsewhere."""
    if row.size < _LONG:
        return False
    turns = 2 * np.pi * np.arange(row.size) / row.size
    window = 0.35875 - 0.48829 * np.cos(turns) + 0.14128 * np.cos(2 * turns) - 0.01168 * np.cos(3 * turns)
    energy = np.abs(np.fft.rfft((row - window @ row / window.sum()) * window)) ** 2
    peak = int(energy.argmax())
    near = energy[max(0, peak - _MAIN) : peak + _MAIN + 1].sum()
    return bool(energy.sum() - near <= _STRAY * energy.sum())


def _are_mirrored(flat: np.ndarray, shape: Shape, noise: float) -> bool:
    """Whether each kernel of one channel, read backwards, is one of them but for the sign, as in blurs and slopes."""
    count, size = shape[0], flat.size // shape[0]
    if not 3 <= size <= _MOST * 8:
        return False
    kernels = np.asarray(flat[: min(count, _ROWS) * size]).astype(np.float64).reshape(-1, size)
    last = np.asarray(flat[-len(kernels) * size :]).astype(np.float64).reshape(-1, size)[::-1]
    near = max(1e-5, 2 * noise) * np.abs(kernels).max()
    uneven = [i for i, kernel in enumerate(kernels) if np.ptp(kernel) > 64 * noise * np.abs(kernel).max()]
    partners = [kernels, last, np.concatenate([kernels[:1], last[: len(kernels) - 1]])]
    return bool(uneven) and any(all(_mirrors(kernels[i], each[i], near) for i in uneven) for each in partners)


def _mirrors(one: np.ndarray, other: np.ndarray, near: float) -> bool:
    """Whether a row read backwards is another one, but for the sign, and for zeros or cut ends at both sides."""
    turned = one[::-1]
    shift = int(np.abs(other).argmax()) - int(np.abs(turned).argmax())
    a, b = (turned, other[shift:]) if shift >= 0 else (turned[-shift:], other)
    length = min(len(a), len(b))
    return 2 * length > len(one) and any(np.allclose(a[:length], s * b[:length], rtol=0, atol=near) for s in (1, -1))


def _is_symmetric(flat: np.ndarray, extent: int) -> bool:
    rows, columns = np.random.default_rng(0).integers(0, extent, (2, _PAIRS))
    rows, columns = rows[rows != columns], columns[rows != columns]
    return equal_at(flat, rows * extent + columns, flat, columns * extent + rows)


def _is_on_circles(flat: np.ndarray, width: int) -> bool:
    """Whether pairs of columns are the sine and the cosine of one angle, side by side or half a row apart."""
    if width < 2 or width % 2:
        return False
    rows = np.asarray(flat[: width * min(len(flat) // width, _APART)]).astype(np.float64).reshape(-1, width)
    for squares in (rows[:, ::2] ** 2 + rows[:, 1::2] ** 2, rows[:, : width // 2] ** 2 + rows[:, width // 2 :] ** 2):
        if squares.max() - squares.min() < 1e-3 * squares.max():
            return True
    return False


def _begins_at_zero(flat: np.ndarray, shape: Shape) -> bool:
    """Whether the first rows of a table are sines, cosines, or both, of 0, 1 and 2 times some frequencies."""
    width = shape[-1]
    if flat.size < 3 * width or not np.isin(flat[:width].astype(np.float64), (0.0, 1.0)).all():
        return False
    first, second, third = (np.asarray(flat[i * width : (i + 1) * width]).astype(np.float64) for i in range(3))
    cosine = first == 1.0
    angle = np.where(cosine, np.arccos(np.clip(second, -1, 1)), np.arcsin(np.clip(second, -1, 1)))
    doubled = np.where(cosine, np.cos(2 * angle), np.sin(2 * angle))
    return bool(np.abs(np.abs(doubled) - np.abs(third)).max() < 1e-2)
