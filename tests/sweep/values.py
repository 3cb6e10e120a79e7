"""What the elements of a drawn input are: by name, so that a case is a line of text."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from foreplan.graph import TensorType
from foreplan.graph.types import DTYPES

Generator = np.random.Generator


def _normal(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    return rng.standard_normal(size)


def _ties(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    """Few small numbers, zeros of both signs among them."""
    return rng.choice(np.array([-2.0, -1.0, -0.0, 0.0, 1.0, 1.0, 2.0]), size)


def _positive(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    return rng.uniform(0.1, 2.0, size)


def _apart(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    """No two alike or close to another, nor to an integer: where differences are taken."""
    return (rng.permutation(size) - size // 2 + 0.37) * 0.173


def _offset(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    """Far from zero beside their spread."""
    return rng.standard_normal(size) + 30.0


def _limits(type: TensorType) -> ml_dtypes.finfo:
    return ml_dtypes.finfo(type.dtype.numpy)


def _tiny(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    """Around the least normal number: denormals, too."""
    return rng.standard_normal(size) * float(_limits(type).tiny) * rng.choice([0.01, 1.0, 4.0], size)


def _huge(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    """Up to the largest number, and ordinary ones."""
    large = rng.uniform(-1, 1, size) * min(float(_limits(type).max), 1e100)  # sums are taken in float64
    return np.where(rng.random(size) < 0.3, large, rng.standard_normal(size))


def _nonfinite(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    found = rng.standard_normal(size)
    strange = rng.choice(np.array([np.nan, np.inf, -np.inf]), size)
    return np.where(rng.random(size) < min(0.2, 2.0 / max(1, size)), strange, found)


def _infinite_below(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    """Numbers, and -inf: masks of scores."""
    return np.where(rng.random(size) < 0.3, -np.inf, rng.standard_normal(size))


def _logarithms(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    """Of numbers up to 1, some of them very small."""
    return -np.abs(rng.standard_normal(size)) * rng.choice([0.0, 0.01, 1.0, 30.0], size)


def _mixed(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    strange = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, float(_limits(type).tiny) / 4])
    return np.where(rng.random(size) < 0.4, rng.choice(strange, size), rng.standard_normal(size) * 10)


def _patterns(rng: Generator, size: int, type: TensorType) -> np.ndarray:
    """Any of a type's bits: all exponents alike, infinities and NaN among them."""
    return rng.integers(0, 256, (size, type.dtype.itemsize), np.uint8).view(type.dtype.numpy).reshape(size)


FLOATS: dict[str, Callable[[Generator, int, TensorType], np.ndarray]] = {
    "normal": _normal,
    "ties": _ties,
    "positive": _positive,
    "apart": _apart,
    "offset": _offset,
    "tiny": _tiny,
    "huge": _huge,
    "nonfinite": _nonfinite,
    "infinite_below": _infinite_below,
    "logarithms": _logarithms,
    "mixed": _mixed,
    "patterns": _patterns,
}
ORDINARY = ("normal", "ties", "positive", "apart", "offset")  # sums of products of these stay far from any limit


def fill(values: str, type: TensorType, seed: int) -> np.ndarray:
    """An array of a type.

    Args:
        values: a key of `FLOATS`; `bits` for all patterns of an integer type; or `low:high`, integers in [low, high).
    """
    rng, shape = np.random.default_rng(seed), type.shape
    if type.dtype.is_float:
        with np.errstate(all="ignore"):
            found = FLOATS[values](rng, type.size, type).astype(np.float64)
            wide = np.float32 if type.dtype == DTYPES["bfloat16"] else np.float64
            return found.astype(wide).astype(type.dtype.numpy).reshape(shape)
    if type.dtype.category == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if values == "bits":
        raw = rng.integers(0, 256, type.nbytes, dtype=np.uint8)
        return raw.view(type.dtype.numpy).reshape(shape)
    low, high = map(int, values.split(":"))
    return rng.integers(low, high, shape).astype(type.dtype.numpy)
