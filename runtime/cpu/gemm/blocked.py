"""Products of float32 matrices that foreplan's own code computes block by block, each thread a share of the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from foreplan.base.units import align_up
from foreplan.graph import Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import Made, entries_of
from foreplan.runtime.cpu.codegen.native import together
from foreplan.runtime.cpu.gemm.nest import ENTRIES, ITEM, Form, compiled_product
from foreplan.runtime.cpu.kernels.rows import merged
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.threads import current_threads
from foreplan.runtime.kernel import Refused, Run

GRAIN = 2**21  # multiplications that are worth a thread


@dataclass(frozen=True)
class Share:
    """What one thread makes: some matrices, rows and columns of them."""

    matrices: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]


class Blocked:
    """y = a·b, or y += a·b, for one matrix or several, perhaps repeated; bound like a primitive of oneDNN.

    Or the results of an epilogue. The first output then takes the place of y. Scratch memory does if the sum takes
    several passes and an output may overwrite a further input.

    Attributes:
        rows, columns, depth: of a product.
        count: of products.
        most_steps: steps along the sum that are taken at once: of the depth only, so threads change no bit.
        most_kept: rows of a, or columns of b, that are kept at once.
        shares: of the threads.
        made: the epilogue, if any; `then`: the form of it.
        form: what the loop is made for.
        apart: whether sums of some steps lie in scratch memory.
        packed: bytes of scratch memory of a thread.
        nanoseconds: predicted.
        wants: the blocks in which b would not be packed with every run.

    Raises:
        Refused: elements are not float32; y's lie apart within rows; matrices are not evenly apart; there is an
            epilogue, and several products or something to add to.
    """

    form: Form
    most_kept: int
    packed = 0
    wants: Blocks | None = None

    def __init__(
        self,
        a: Window,
        b: Window,
        y: Window,
        add: bool,
        made: Made | None,
        steps: tuple[int, int],
        sides: tuple[int, int],
    ) -> None:
        """Describe the product.

        Args:
            steps: along the sum, that are taken at once at most, and what their number is a multiple of.
            sides: rows and columns, of which the shares of threads are multiples.
        """
        if any(x.type.dtype != FLOAT32 or min(x.strides) < 0 for x in (a, b, y)) or not a.type.size * b.type.size:
            raise Refused(f"a product of {a.type} and {b.type}")
        batch, (self.rows, self.columns), self.depth = y.shape[:-2], y.shape[-2:], a.shape[-1]
        if self.columns > 1 and y.strides[-1] != ITEM:
            raise Refused(f"{y.type} with the strides {y.strides}")
        self.count, self.add, self.made = math.prod(batch), add, made
        if made is not None and (self.count > 1 or add):
            raise Refused("an epilogue takes a single product that is added to nothing")
        self.steps = [x.strides[-2:] for x in (a, b, y)]
        self.matrices = [_apart(x, batch) for x in (a, b, y)]
        self.then = made.then if made else None
        self.nanoseconds = prices.mapped(made.beside) if made else 0
        blocks = -(-self.depth // steps[0])
        self.most_steps = align_up(-(-self.depth // blocks), steps[1])
        self.shares = self._shares(*sides)
        self.apart = (
            made is not None and blocks > 1 and (bool(made.overwrites()) or made.outputs[0].type.dtype != FLOAT32)
        )
        self.steps[2] = (self.columns * ITEM, ITEM) if self.apart else self.steps[2]

    @property
    def scratchpad(self) -> int:
        """Bytes for what each thread packs, and for sums of some steps."""
        return self.packed * len(self.shares) + self.apart * self.rows * self.columns * ITEM

    def _shares(self, row: int, column: int) -> list[Share]:
        """Some matrices for each thread; or, of each matrix, some rows or columns, whichever are more."""
        threads = max(1, min(current_threads(), self.count * self.rows * self.columns * self.depth // GRAIN))
        matrices, rows, columns = (0, self.count), (0, self.rows), (0, self.columns)
        if self.count >= threads:
            return [Share(part, rows, columns) for part in _parts(self.count, 1, threads)]
        if self.rows > self.columns:
            return [Share(matrices, part, columns) for part in _parts(self.rows, row, threads)]
        return [Share(matrices, rows, part) for part in _parts(self.columns, column, threads)]

    def bind(self, addresses: Mapping[int, int]) -> Run:
        """A call of the product on these addresses: `SRC`, `WEIGHTS`, `DST` and `SCRATCHPAD`."""
        a, b, y = (addresses[argument] for argument in (c.SRC, c.WEIGHTS, c.DST))
        scratch = addresses[c.SCRATCHPAD] if self.scratchpad else 0
        call, sums = compiled_product(self.form), scratch + self.packed * len(self.shares)
        calls: list[Run] = []
        for i, share in enumerate(self.shares):
            numbers = self.numbers(share, a, b, sums if self.apart else y, scratch + i * self.packed)
            table = [numbers[name] for name in (*ENTRIES, *self.form.further)]
            if self.made is not None:
                table += entries_of(self.made, addresses, share.rows[0], share.columns[0])
            calls.append(partial(call, *share.matrices, np.array(table, np.int64).tobytes() + self.form.behind))
        return together(calls)

    def numbers(self, share: Share, a: int, b: int, y: int, scratch: int) -> dict[str, int]:
        """Numbers of a table, by name."""
        (a_row, a_step), (b_step, b_column), (y_row, _) = self.steps
        (top, bottom), (left, right) = share.rows, share.columns
        return {
            "a": a + top * a_row,
            "a_matrix": self.matrices[0],
            "a_row": a_row,
            "a_step": a_step,
            "b": b + left * b_column,
            "b_matrix": self.matrices[1],
            "b_column": b_column,
            "b_step": b_step,
            "y": y + top * y_row + left * ITEM,
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


def lies_along(x: Window, axis: int) -> bool:
    """Whether the elements of matrices lie side by side along an axis; if not, along the other.

    Raises:
        Refused: along neither.
    """
    shape, strides = x.shape, x.strides
    if shape[axis] == 1 or strides[axis] == ITEM:
        return True
    other = -3 - axis
    if shape[other] > 1 and strides[other] != ITEM:
        raise Refused(f"a matrix {tuple(shape[-2:])} with the strides {tuple(strides[-2:])}")
    return False


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
