"""Predicted times of the ways to run a convolution or a product, to choose one from several.

Rates were measured on one core with AVX-512 and AMX; `tune` measures instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Window
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu.threads import current_threads
from foreplan.units import align_up

# Bytes a nanosecond: of weights and their gradients that change layout; of results that are added to others, in a
# second pass, and by the product itself; of a gradient that oneDNN spreads over positions that no tap saw.
WEIGHTS, WEIGHTS_BACK, SECOND_PASS, ADDED, SPREAD = 4, 2, 12, 32, 5
# Nanoseconds of a number that is gathered for a product; bytes a nanosecond of weights that a product packs, of
# several taps and of one.
GATHERED, PACKED, PACKED_ROWS = 1, 12, 24
# Bytes a nanosecond that a map reads and writes in a core's cache, and bytes that the cache holds.
MAPPED, CACHE = 60, 2**21
# Operations a nanosecond of small products by vector instructions, and nanoseconds of a call.
VECTORS, NEAR = 100, 100
# Bytes a nanosecond of images of float32 on both sides of a convolution.
IMAGES = 16
# Of products of float32, by tile registers: operations a nanosecond, and numbers packed, read and written; by oneDNN:
# bytes read and written, and the same where they fit half a core's cache; and nanoseconds of a call.
TILES, MOVED, READ, READ_NEAR, CALL = 480, 5, 11, 20, 500


@dataclass(frozen=True)
class _Rates:
    """Operations a nanosecond: of oneDNN's convolutions and of products, and of their weights' gradients by both."""

    direct: int
    products: int
    direct_weights: int
    products_weights: int


_WIDE, _NARROW = _Rates(205, 195, 177, 175), _Rates(1450, 1200, 650, 780)


def _rates(y: Window) -> _Rates:
    return _NARROW if y.type.dtype.is_narrow else _WIDE


def product(a: Window, b: Window, y: Window) -> int:
    """Products of matrices by oneDNN."""
    nbytes, operations = sum(x.type.nbytes for x in (a, b, y)), 2 * y.type.size * a.shape[-1]
    if a.type.dtype.is_narrow:
        return max(operations // _NARROW.products, nbytes // SECOND_PASS) // current_threads()
    read = READ_NEAR if nbytes < CACHE // 2 else READ
    return (operations // _WIDE.products + nbytes // read) // current_threads() + CALL


def tiles(count: int, rows: int, columns: int, depth: int, packed: int) -> int:
    """Some products of matrices by `tiles`.

    Args:
        packed: packed rows and columns.
    """
    rows, columns, depth = (align_up(extent, 32) for extent in (rows, columns, depth))
    moved = rows * depth + depth * columns + rows * columns + align_up(packed, 32) * depth
    return count * (2 * rows * columns * depth // TILES + moved // MOVED) // current_threads() + CALL


def vectors(rows: int, columns: int, depth: int, across: bool) -> int:
    """A product by `vectors`, on one thread.

    Args:
        across: whether rows of the second matrix lie across the sum.
    """
    if across:
        rows, columns = align_up(rows, 8), align_up(columns, 48)
    else:
        rows, columns, depth = align_up(rows, 4), align_up(columns, 4), align_up(depth, 16) + 40
    return 2 * rows * columns * depth // VECTORS + NEAR


def direct(w: Window, y: Window, added: int = 0, spread: int = 0) -> int:
    """A convolution by oneDNN, or its data's gradient; y are results or cotangents.

    Args:
        added: bytes that are added to others.
        spread: bytes of a gradient that has positions which no tap saw.
    """
    passes = w.type.nbytes // WEIGHTS + added // SECOND_PASS + spread // SPREAD + _images(w, y)
    return (_operations(w, y) // _rates(y).direct + passes) // current_threads()


def products(w: Window, y: Window, added: int = 0) -> int:
    """A convolution of one tap, or its data's gradient, as a product of matrices."""
    passes = w.type.nbytes // PACKED_ROWS + added // ADDED + _images(w, y)
    return (_operations(w, y) // _rates(y).products + passes) // current_threads()


def columns(w: Window, y: Window) -> int:
    """A convolution of several taps as a product of gathered numbers, with the time to pack the weights."""
    gathered = y.type.size // y.shape[1] * (w.type.size // w.shape[0])
    passes = gathered * GATHERED + w.type.nbytes // PACKED
    return (_operations(w, y) // _rates(y).products + passes) // current_threads()


def direct_weights(w: Window, g: Window) -> int:
    """The gradient of weights by oneDNN."""
    passes = w.type.nbytes // WEIGHTS_BACK + _images(w, g)
    return (_operations(w, g) // _rates(g).direct_weights + passes) // current_threads()


def products_weights(w: Window, g: Window) -> int:
    """The gradient of weights of one tap as a product of matrices."""
    return (_operations(w, g) // _rates(g).products_weights + _images(w, g)) // current_threads()


def mapped(nbytes: int) -> int:
    """A map right after its inputs were made: from a core's cache, if that holds them."""
    return nbytes // (MAPPED if nbytes < CACHE else 2 * SECOND_PASS) // current_threads()


def converted(tensors: Sequence[Window]) -> int:
    """Conversions of narrow tensors to float32, or back."""
    nbytes = sum((x.type.dtype.itemsize + FLOAT32.itemsize) * x.type.size for x in tensors)
    return nbytes // SECOND_PASS // current_threads()


def _images(w: Window, y: Window) -> int:
    """Reading and writing both images; for narrow ones the rates include it."""
    positions = y.type.size // y.shape[1]
    return 0 if y.type.dtype.is_narrow else FLOAT32.itemsize * positions * (w.shape[1] + y.shape[1]) // IMAGES


def _operations(w: Window, y: Window) -> int:
    """Of all taps at all positions, multiply-add = 2."""
    return 2 * w.type.size * (y.type.size // y.shape[1])
