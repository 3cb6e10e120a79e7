"""Small products of float32 matrices by vector instructions: where packing, or a call of a library, takes longest."""

from __future__ import annotations

from foreplan.graph import Window
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import Made
from foreplan.runtime.cpu.gemm.blocked import Blocked
from foreplan.runtime.cpu.gemm.nest import ITEM
from foreplan.runtime.cpu.gemm.registers import block_for
from foreplan.runtime.cpu.gemm.vectors_loop import SIDE, Product
from foreplan.runtime.kernel import Refused

SMALL = 2**21  # multiplications, at most: on one thread, and of operands that a core's cache holds


class Vectors(Blocked):
    """A product y = a·b, or its epilogue: see `Blocked`. It needs no scratch memory.

    Raises:
        Refused: it is not small; or neither rows of b lie side by side across the sum, nor rows of a and columns of b
            along it; or see `Blocked`.
    """

    def __init__(self, a: Window, b: Window, y: Window, *, made: Made | None = None) -> None:
        if len(y.shape) != 2 or y.type.size * a.shape[-1] > SMALL:
            raise Refused(f"a product of {a.type} and {b.type}")
        super().__init__(a, b, y, False, made or Made(("a0",), (), (y,)), (a.shape[-1], 1), (1, 1))
        across = self.columns == 1 or b.strides[1] == ITEM
        if not across and not (self.depth == 1 or a.strides[1] == b.strides[0] == ITEM):
            raise Refused(f"{a.type} and {b.type} with the strides {a.strides} and {b.strides}")
        block, high = block_for(self.rows, self.columns), min(SIDE, 1 << (self.rows - 1).bit_length())
        self.form = Product(self.then, 0 if across else high, block)
        self.most_kept = block.columns if across else high
        self.nanoseconds += prices.vectors(self.rows, self.columns, self.depth, block if across else high)
