"""Predicted times of the ways to run a convolution or a product, to choose one from several.

Rates depend on the instruction set and on the processor's family: some with AVX-512 have registers of 512 bits and half
the arithmetic. prices.toml has those of each level and family that was measured, and says how. Others get those of
`USUAL`. `tune` measures instead.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from foreplan.base.processor import family
from foreplan.base.units import align_up
from foreplan.graph import Window
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu.gemm.registers import Block
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.runtime.cpu.threads import current_threads

# Bytes a nanosecond: of weights and their gradients that change layout; of results that are added to others, in a
# second pass, and by the product itself; of a gradient that oneDNN spreads over positions that no tap saw.
WEIGHTS, WEIGHTS_BACK, SECOND_PASS, ADDED, SPREAD = 4, 2, 12, 32, 5
# Nanoseconds of a number that is gathered for a product, and of one that lies far from all others; bytes a nanosecond
# of weights that a product packs, of several taps and of one.
GATHERED, FAR, PACKED, PACKED_ROWS = 1, 6, 12, 24
# Bytes a nanosecond that a map reads and writes in a core's cache, and bytes that the cache holds.
MAPPED, CACHE = 60, 2**21
NEAR = 100  # nanoseconds of a call of a small product
# Bytes a nanosecond of weights that are read in order from memory: what they cost beside multiplications, and alone.
STREAMED, ALONE = 64, 26
# Bytes a nanosecond of images of float32 on both sides of a convolution. What depth-wise convolutions by foreplan's own
# loops reach of the rate of oneDNN's convolutions: with nine taps or fewer, and with more, which registers do not hold.
IMAGES, DEPTHWISE, DEPTHWISE_MANY = 16, 0.7, 0.34
# Of products of float32: numbers a nanosecond that tiles pack, read and write; that panels pack, and the same where all
# fit half a core's cache; and results that panels add to others. Of oneDNN, bytes read and written, and the same where
# they fit there. Nanoseconds of a call.
MOVED, COPIED, COPIED_NEAR, SUMMED, READ, READ_NEAR, CALL = 5, 3.3, 10, 30, 11, 20, 500
# Numbers a nanosecond of loops, with AVX-512: logits that become exponentials, and those gradients; and scores that
# become probabilities, or gradients. Half as many without, where a register holds half as many.
EXPONENTIALS, LOGITS, SCORES = 1.7, 5.8, 1.25
NONE = 0.001  # operations a nanosecond of a way that does not exist: some are priced before that is known
_FILE = Path(__file__).with_suffix(".toml")
USUAL = "Intel family 6"  # of which all levels were measured


@dataclass(frozen=True)
class Rates:
    """Operations a nanosecond of one core, multiply-add = 2.

    Attributes:
        measured: how, for people.
        peak: of a large product of float32, by the fastest way.
        product, product_narrow: oneDNN's products of float32, and of bfloat16.
        direct, direct_narrow: its convolutions, and their data's gradients.
        weights, weights_narrow: its gradients of their weights.
        tiles, panels, vectors: foreplan's own products of float32. A rate of 0 in the file means that there are none.
    """

    measured: str
    peak: float
    product: float
    product_narrow: float
    direct: float
    direct_narrow: float
    weights: float
    weights_narrow: float
    tiles: float
    panels: float
    vectors: float


@lru_cache(maxsize=1)
def rates() -> Rates:
    """Those of this machine's instruction set and family, or of the usual one."""
    some: dict[str, Any] = {name: rate or NONE for name, rate in _families()[taken_from()][level().name].items()}
    return Rates(**some)


def taken_from() -> str:
    """The family whose rates are taken."""
    return family() if is_known() else USUAL


def is_known() -> bool:
    """Whether rates of this machine's instruction set were measured on a processor of its family."""
    return level().name in _families().get(family(), {})


@lru_cache(maxsize=1)
def _families() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Rates by family and level."""
    return tomllib.loads(_FILE.read_text())


def product(a: Window, b: Window, y: Window) -> int:
    """Products of matrices by oneDNN."""
    nbytes, operations = sum(x.type.nbytes for x in (a, b, y)), 2 * y.type.size * a.shape[-1]
    if a.type.dtype.is_narrow:
        return int(max(operations / rates().product_narrow, nbytes / SECOND_PASS)) // current_threads()
    read = READ_NEAR if nbytes < CACHE // 2 else READ
    rate = rates().product * min(_aligned(a, -1), _aligned(b, -2))
    return int(operations / rate + nbytes / read) // current_threads() + CALL


def _aligned(x: Window, along: int) -> float:
    """The share of its rate that oneDNN reaches with AVX or AVX2 where elements lie side by side across the sum: less
    if steps are so far apart that they meet in few sets of a cache, by a multiple of 4 KiB. On the right only a power
    of two costs time; other matrices seem to be copied. Measured on one core, at distances of 512 to 6,144 elements.
    """
    step = x.strides[along]
    if level() not in (Level.AVX, Level.AVX2) or step == FLOAT32.itemsize:
        return 1
    apart = step & -step
    if along == -2 and apart != step:
        return 1
    return (0.95 if along == -1 else 1) if apart < 2048 else 0.75 if apart < 4096 else 0.45


def tiles(count: int, rows: int, columns: int, depth: int, packed: int) -> int:
    """Some products of matrices by `tiles`.

    Args:
        packed: packed rows and columns.
    """
    rows, columns, depth = (align_up(extent, 32) for extent in (rows, columns, depth))
    moved = rows * depth + depth * columns + rows * columns + align_up(packed, 32) * depth
    return int(count * (2 * rows * columns * depth / rates().tiles + moved / MOVED)) // current_threads() + CALL


def panels(
    count: int, rows: int, columns: int, depth: int, results: int, packed: float, streamed: int, added: int
) -> int:
    """Some products of matrices by `panels`.

    Args:
        rows, columns: whole blocks.
        results: that would take as long in whole blocks.
        packed: numbers that are packed; half of those that are only read.
        streamed: numbers that are read in order, most of the time while others are multiplied.
        added: how often sums of some steps are added to results.
    """
    sums, nbytes = 2 * results * depth / rates().panels, FLOAT32.itemsize * streamed
    near = FLOAT32.itemsize * (rows * depth + depth * columns + rows * columns) < CACHE // 2
    moved = packed / (COPIED_NEAR if near else COPIED) + added * rows * columns / SUMMED
    moved += nbytes / STREAMED if nbytes >= CACHE else 0
    return int(count * (sums + moved)) // current_threads() + CALL


def vectors(rows: int, columns: int, depth: int, block: Block | int) -> int:
    """A product by `vectors`, on one thread.

    Args:
        block: results that are computed together across the sum; or how many rows along it.
    """
    if isinstance(block, Block):
        rows, columns = align_up(rows, block.rows), align_up(columns, block.columns)
    else:
        rows, columns, depth = align_up(rows, block), align_up(columns, 16 // block), align_up(depth, 16) + 40
    nbytes = FLOAT32.itemsize * columns * depth
    read = nbytes / ALONE if nbytes >= CACHE else 0
    return int(max(2 * rows * columns * depth / rates().vectors, read)) + NEAR


def direct(w: Window, y: Window, added: int = 0, spread: int = 0, x: Window | None = None) -> int:
    """A convolution by oneDNN, or its data's gradient; y are results or cotangents. Weights in blocks are only read.

    Args:
        added: bytes that are added to others.
        spread: bytes of a gradient that has positions which no tap saw.
        x: the data of a convolution in groups, which reads more channels than its weights have.
    """
    moved = w.type.nbytes / (WEIGHTS if w.blocks is None else READ)
    seen = None if y.type.dtype.is_narrow else x
    images = _images(w, y) if seen is None else (seen.type.nbytes + y.type.nbytes) / IMAGES
    passes = moved + added / SECOND_PASS + spread / SPREAD + images
    rate = rates().direct_narrow if y.type.dtype.is_narrow else rates().direct
    return int(_operations(w, y) / rate + passes) // current_threads()


def depthwise(w: Window, y: Window, x: Window) -> int:
    """A depth-wise convolution by foreplan's own loops."""
    moved = (x.type.nbytes + y.type.nbytes) / IMAGES
    share = DEPTHWISE if math.prod(w.shape[2:]) <= 9 else DEPTHWISE_MANY
    return int(_operations(w, y) / (share * rates().direct) + moved) // current_threads()


def products(w: Window, y: Window, added: int = 0) -> int:
    """A convolution of one tap, or its data's gradient, as a product of matrices."""
    passes = w.type.nbytes / PACKED_ROWS + added / ADDED + _images(w, y)
    return int(_operations(w, y) / _of_products(y) + passes) // current_threads()


def columns(w: Window, y: Window) -> int:
    """A convolution of several taps as a product of gathered numbers, with the time to pack the weights."""
    gathered = y.type.size // y.shape[1] * (w.type.size // w.shape[0])
    passes = gathered * GATHERED + w.type.nbytes / PACKED
    return int(_operations(w, y) / _of_products(y) + passes) // current_threads()


def direct_weights(w: Window, g: Window) -> int:
    """The gradient of weights by oneDNN."""
    passes = w.type.nbytes / WEIGHTS_BACK + _images(w, g)
    rate = rates().weights_narrow if g.type.dtype.is_narrow else rates().weights
    return int(_operations(w, g) / rate + passes) // current_threads()


def products_weights(w: Window, g: Window) -> int:
    """The gradient of weights of one tap as a product of matrices."""
    return int(_operations(w, g) / _of_products(g) + _images(w, g)) // current_threads()


def mapped(nbytes: int) -> int:
    """A map right after its inputs were made: from a core's cache, if that holds them."""
    return nbytes // (MAPPED if nbytes < CACHE else 2 * SECOND_PASS) // current_threads()


def loops(numbers: int, rate: float) -> int:
    """Loops over numbers in a core's cache, by one of the rates above."""
    return int(numbers / (rate if level() >= Level.AVX512 else rate / 2)) // current_threads()


def gathered(numbers: int) -> int:
    """Numbers read one by one, far from one another."""
    return numbers * FAR // current_threads()


def converted(tensors: Sequence[Window]) -> int:
    """Conversions of narrow tensors to float32, or back."""
    nbytes = sum((x.type.dtype.itemsize + FLOAT32.itemsize) * x.type.size for x in tensors)
    return nbytes // SECOND_PASS // current_threads()


def _of_products(y: Window) -> float:
    return rates().product_narrow if y.type.dtype.is_narrow else rates().product


def _images(w: Window, y: Window) -> float:
    """Reading and writing both images; for narrow ones the rates include it."""
    positions = y.type.size // y.shape[1]
    return 0 if y.type.dtype.is_narrow else FLOAT32.itemsize * positions * (w.shape[1] + y.shape[1]) / IMAGES


def _operations(w: Window, y: Window) -> int:
    """Of all taps at all positions, multiply-add = 2."""
    return 2 * w.type.size * (y.type.size // y.shape[1])
