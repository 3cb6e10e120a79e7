"""Two functions that NumPy lacks: sigmoid, built from NumPy's functions, and erf, a compiled loop.

Both take arrays of any strides, and `out` may be the argument itself. They work on pieces of a few thousand elements,
and hold nothing larger. Narrow floats are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

_PIECE = 4096  # elements
_TAIL = -40.0  # below it 1 + e^x rounds to 1 in float64, and above it e^-x is finite in float32


def sigmoid(x: Any, out: np.ndarray) -> None:
    """1 / (1 + e^-x), down to the smallest numbers of the type.

    Where e^-x would overflow, the result at `_TAIL` is multiplied by e^(x - _TAIL), whose exponent is exact.
    """
    for piece, result in _pieces(x, out):
        if not (piece < _TAIL).any():
            _logistic(piece, result)
            continue
        factor = np.subtract(piece, _TAIL)
        np.minimum(factor, 0, out=factor)
        np.exp(factor, out=factor)
        _logistic(np.maximum(piece, _TAIL, out=result), result)
        np.multiply(result, factor, out=result)


def _logistic(x: np.ndarray, out: np.ndarray) -> None:
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, 1, out=out)
    np.reciprocal(out, out=out)


def erf(x: Any, out: np.ndarray) -> None:
    """The error function, 2/√π ∫₀ˣ e^(-t²) dt, as the C library computes it."""
    loop = _erf_loop()
    for piece, result in _pieces(x, out):
        loop(piece, result)


@cache
def _erf_loop() -> Callable[[np.ndarray, np.ndarray], None]:
    from foreplan.jit import compiled

    @compiled
    def erf_loop(x: np.ndarray, out: np.ndarray) -> None:
        for i in range(x.size):
            out[i] = math.erf(x[i])

    return erf_loop


def _pieces(x: Any, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Contiguous pieces of both. NumPy's iterator copies where it must, and then writes the results back."""
    wide = np.dtype(np.float32) if out.itemsize < 4 else out.dtype
    how: Any = [["readonly", "contig"], ["writeonly", "contig"]]  # NumPy's stubs do not know "contig"
    flags: Any = ["buffered", "external_loop", "zerosize_ok"]
    with np.nditer((x, out), flags, how, [wide, wide], casting="same_kind", buffersize=_PIECE) as pieces:
        yield from pieces
