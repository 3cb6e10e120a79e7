"""Small products of float32 matrices by vector instructions: where packing, or a call of a library, takes longest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from foreplan.graph import Window
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import Made, entries_of
from foreplan.runtime.cpu.gemm.registers import block_for
from foreplan.runtime.cpu.gemm.vectors_loop import ENTRIES, SIDE, Product, compiled_product
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.kernel import Refused, Run

SMALL = 2**21  # multiplications, at most: on one thread, and of operands that a core's cache holds
_ITEM = FLOAT32.itemsize


class Vectors:
    """A product y = a·b, or its epilogue; bound like a primitive of oneDNN.

    Attributes:
        scratchpad: none.
        nanoseconds: predicted.

    Raises:
        Refused: it is not small, elements are not float32, or neither rows of b lie side by side across the sum, nor
            rows of a and columns of b along it.
    """

    scratchpad = 0

    def __init__(self, a: Window, b: Window, y: Window, *, made: Made | None = None) -> None:
        self.rows, self.depth, self.columns = *a.shape[-2:], b.shape[-1]
        small = len(y.shape) == 2 and 0 < self.rows * self.depth * self.columns <= SMALL
        if not small or any(x.type.dtype != FLOAT32 for x in (a, b, y)):
            raise Refused(f"a product of {a.type} and {b.type}")
        self.made = made or Made(("a0",), (), (y,))
        across = self.columns == 1 or b.strides[1] == _ITEM
        along = self.depth == 1 or a.strides[1] == b.strides[0] == _ITEM
        if not across and not along:
            raise Refused(f"{a.type} and {b.type} with the strides {a.strides} and {b.strides}")
        self.a_steps, self.b_step = a.strides, b.strides[0] if across else b.strides[1]
        block = block_for(self.rows, self.columns)
        high = min(SIDE, 1 << (self.rows - 1).bit_length())
        self.product = Product(0 if across else high, block, self.made.then)
        self.nanoseconds = prices.vectors(self.rows, self.columns, self.depth, block if across else high)
        self.nanoseconds += prices.mapped(self.made.beside)

    def bind(self, addresses: Mapping[int, int]) -> Run:
        """A call of the product on these addresses: `SRC`, `WEIGHTS`, `DST`, and those of the epilogue."""
        numbers = {
            "a": addresses[c.SRC],
            "a_row": self.a_steps[0],
            "a_step": self.a_steps[1],
            "b": addresses[c.WEIGHTS],
            "b_other": self.b_step,
            "rows": self.rows,
            "columns": self.columns,
            "depth": self.depth,
        }
        table = [*(numbers[name] for name in ENTRIES), *entries_of(self.made, addresses)]
        high = self.product.along
        extent, each = (self.rows, high) if high else (self.columns, self.product.block.columns)
        return partial(compiled_product(self.product), 0, -(-extent // each), np.array(table, np.int64).tobytes())
