"""Products of float32 matrices on tile registers, each number as the sum of three of bfloat16 (see `tiles_loop`).

Errors are below those of sums in float32: a tile adds up 32 products before it rounds, and sums of 512 are added up.
NaN and infinities are right, except that infinity times infinity is NaN. Parts below 1e-38 count as zero.

Panels of some columns of b, or rows of a, stay in a core's cache, while panels of the other operand pass by (Goto and
van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import llvmlite.binding as binding
import numpy as np

from foreplan.graph import Window
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import Made, entries_of
from foreplan.runtime.cpu.codegen.native import together
from foreplan.runtime.cpu.gemm.tiles_loop import CONFIGURATION, DEPTH, ENTRIES, SIDE, STEP, Product, compiled_product
from foreplan.runtime.cpu.kernels.rows import merged
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.threads import current_threads
from foreplan.runtime.kernel import Refused, Run
from foreplan.units import align_up

STEPS = 512  # steps along the sum that are packed at once, at most
KEPT = 2**17  # packed numbers that are kept, at most: with those that pass, half of a core's cache
PAGE = 4096  # bytes; lines at this distance share a set of the first cache
GRAIN = 2**21  # multiplications that are worth a thread
_ITEM = FLOAT32.itemsize
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # Linux: a process asks for the registers before it uses them


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this process may use tile registers."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-bf16", "avx512f", "avx512bw", "avx512vl")):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


@dataclass(frozen=True)
class _Share:
    """What one thread makes: some matrices, rows and columns of them."""

    matrices: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]


class Tiles:
    """y = a·b, or y += a·b, for one matrix or several, perhaps repeated; bound like a primitive of oneDNN.

    Or the results of an epilogue. The first output then takes the place of y. Scratch memory does if the sum takes
    several passes and an output may overwrite a further input.

    Attributes:
        scratchpad: bytes for the panels of each thread, and for sums of some steps.
        nanoseconds: predicted.

    Raises:
        Refused: there are no tile registers; elements are not float32; a matrix has no axis with elements side by side,
            or y's lie apart within rows; matrices are not evenly apart.
    """

    def __init__(self, a: Window, b: Window, y: Window, *, add: bool = False, made: Made | None = None) -> None:
        if not available():
            raise Refused("there are no tile registers")
        if any(x.type.dtype != FLOAT32 or min(x.strides) < 0 for x in (a, b, y)) or not a.type.size * b.type.size:
            raise Refused(f"a product of {a.type} and {b.type}")
        batch, (self.rows, self.columns), self.depth = y.shape[:-2], y.shape[-2:], a.shape[-1]
        if self.columns > 1 and y.strides[-1] != _ITEM:
            raise Refused(f"{y.type} with the strides {y.strides}")
        self.count, self.add = math.prod(batch), add
        self.steps = [x.strides[-2:] for x in (a, b, y)]
        self.matrices = [_apart(x, batch) for x in (a, b, y)]
        blocks = -(-self.depth // STEPS)
        self.most_steps = align_up(-(-self.depth // blocks), DEPTH)  # of the sum only, so threads change no bit
        self.shares = self._shares()
        self.most_kept = KEPT // self.most_steps // SIDE * SIDE
        a_along, b_along = _along(a.shape, a.strides, -1), _along(b.shape, b.strides, -2)
        keeps_a = self._keeps_a(a_along)
        self.made = made
        if made is not None and (self.count > 1 or add):
            raise Refused("an epilogue takes a single product that is added to nothing")
        self.product = Product(a_along, b_along, keeps_a, made.then if made else None)
        kept = max(high - low for low, high in (x.rows if keeps_a else x.columns for x in self.shares))
        self.most_kept = min(self.most_kept, align_up(kept, SIDE))
        self.panels = (2 + self.most_kept // SIDE) * (self.most_steps // DEPTH) * STEP
        self.apart = (
            made is not None and blocks > 1 and (bool(made.overwrites()) or made.outputs[0].type.dtype != FLOAT32)
        )
        self.steps[2] = (self.columns * _ITEM, _ITEM) if self.apart else self.steps[2]
        self.scratchpad = self.panels * len(self.shares) + self.apart * y.type.nbytes
        packed = self._passes(*((self.rows, self.columns) if keeps_a else (self.columns, self.rows)))
        self.nanoseconds = prices.tiles(self.count, self.rows, self.columns, self.depth, packed)
        self.nanoseconds += prices.mapped(made.beside) if made else 0

    def _keeps_a(self, a_along: bool) -> bool:
        """Whether a is kept while b passes: if all of a is kept; or if less is packed so, and a's rows are not in the
        order of packing, which is fetched ahead best.
        """
        fewer = self._passes(self.rows, self.columns) <= self._passes(self.columns, self.rows)
        return self.rows < self.columns and (self.rows <= self.most_kept or (fewer and not a_along))

    def _passes(self, kept: int, passing: int) -> int:
        """Rows and columns that are packed, if `kept` are kept in turns while all of `passing` pass."""
        return kept + -(-kept // self.most_kept) * passing

    def _shares(self) -> list[_Share]:
        """Some matrices for each thread; or, of each matrix, some rows or columns, whichever are more."""
        threads = max(1, min(current_threads(), self.count * self.rows * self.columns * self.depth // GRAIN))
        matrices, rows, columns = (0, self.count), (0, self.rows), (0, self.columns)
        if self.count >= threads:
            return [_Share(part, rows, columns) for part in _parts(self.count, 1, threads)]
        if self.rows > self.columns:
            return [_Share(matrices, part, columns) for part in _parts(self.rows, SIDE, threads)]
        return [_Share(matrices, rows, part) for part in _parts(self.columns, SIDE, threads)]

    def bind(self, addresses: Mapping[int, int]) -> Run:
        """A call of the product on these addresses: `SRC`, `WEIGHTS`, `DST` and `SCRATCHPAD`."""
        a, b, y, scratch = (addresses[argument] for argument in (c.SRC, c.WEIGHTS, c.DST, c.SCRATCHPAD))
        call, sums = compiled_product(self.product), scratch + self.panels * len(self.shares)
        starts = range(scratch, sums, self.panels)
        tables = []
        for share, start in zip(self.shares, starts):
            table = self._table(share, a, b, sums if self.apart else y, start)
            if self.made is not None:
                table += entries_of(self.made, addresses, share.rows[0], share.columns[0])
            tables.append(np.array(table, np.int64).tobytes() + CONFIGURATION)
        return together([partial(call, *share.matrices, table) for share, table in zip(self.shares, tables)])

    def _table(self, share: _Share, a: int, b: int, y: int, scratch: int) -> list[int]:
        """The table that the loop takes."""
        (a_row, a_step), (b_step, b_column), (y_row, _) = self.steps
        (top, bottom), (left, right) = share.rows, share.columns
        numbers = {
            "a": a + top * a_row,
            "a_matrix": self.matrices[0],
            "a_row": a_row,
            "a_step": a_step,
            "a_following": _following(a_row, a_step, self.product.a_along),
            "b": b + left * b_column,
            "b_matrix": self.matrices[1],
            "b_column": b_column,
            "b_step": b_step,
            "b_following": _following(b_column, b_step, self.product.b_along),
            "y": y + top * y_row + left * _ITEM,
            "y_matrix": self.matrices[2],
            "y_row": y_row,
            "scratch": scratch,
            "rows": bottom - top,
            "columns": right - left,
            "depth": self.depth,
            "most_kept": self.most_kept,
            "most_steps": self.most_steps,
            "adds": int(self.add),
        }
        return [numbers[name] for name in ENTRIES]


def _along(shape: Sequence[int], strides: Sequence[int], axis: int) -> bool:
    """Whether the elements of a matrix lie side by side along an axis; if not, along the other."""
    if shape[axis] == 1 or strides[axis] == _ITEM:
        return True
    other = -3 - axis
    if shape[other] > 1 and strides[other] != _ITEM:
        raise Refused(f"a matrix {tuple(shape[-2:])} with the strides {tuple(strides[-2:])}")
    return False


def _following(across: int, along: int, is_along: bool) -> int:
    """Bytes to the unit that is fetched ahead: that of the next panel; or the next one of the same panel, if the lines
    of both would share sets of a cache.
    """
    return DEPTH * along if not is_along and along % PAGE == 0 else SIDE * across


def _apart(x: Window, batch: Sequence[int]) -> int:
    """Bytes from a matrix to the next, in C order of the leading axes; along some of these a matrix may be repeated."""
    missing = len(batch) + 2 - len(x.shape)
    extents, steps = (1,) * missing + x.shape[:-2], (0,) * missing + x.strides[:-2]
    _, step = merged(batch, [0 if extent == 1 else step for extent, step in zip(extents, steps)], 0)
    if step < 0:
        raise Refused(f"{x.type} with the strides {x.strides}")
    return step


def _parts(extent: int, each: int, most: int) -> list[tuple[int, int]]:
    """Ranges of about the same extent, each beginning at a multiple of a number."""
    blocks = -(-extent // each)
    parts = min(most, blocks)
    bounds = [min(extent, each * (blocks * i // parts)) for i in range(parts + 1)]
    return list(pairwise(bounds))
