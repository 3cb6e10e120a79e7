"""Products of float32 matrices by vector instructions, with an epilogue if there is one (see `panels_loop`)."""

from __future__ import annotations

from foreplan.base.units import align_up
from foreplan.graph import TensorType, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import Made
from foreplan.runtime.cpu.codegen.loops import WIDTH
from foreplan.runtime.cpu.gemm.blocked import Blocked, Share, lies_along
from foreplan.runtime.cpu.gemm.nest import ITEM
from foreplan.runtime.cpu.gemm.panels_loop import Product
from foreplan.runtime.cpu.gemm.registers import Block, block_with_edges, edge_of, time_with_edges
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.runtime.kernel import Refused

# Steps along the sum that are packed at once, at most. With twice as many, products are 1 to 5 % faster, and errors 1.4
# times NumPy's.
STEPS = 384
KEPT = 2**17  # packed numbers that are kept, at most: half of a core's cache of 1 MiB
# Few rows pass by so soon that panels are packed a few at a time, and read again before they leave the nearest caches:
# 32 x 256 x 1,024 in 105 us instead of 146 (AVX-512).
FEW_ROWS, KEPT_FOR_FEW = 128, 2**14
ROWS = 96  # of a that are packed at once, at most: whole blocks of each kind
NEAR = 256  # bytes from a step to the next: operands that lie across the sum are read where they lie
FEW = 3  # blocks of columns: rows of a are not worth packing for them
TURN = 16  # steps that are packed together


class Panels(Blocked):
    """A product by vector instructions: see `Blocked`. b may lie in panels already, in the blocks that it `wants`.

    Raises:
        Refused: an operand has no axis with elements side by side; or see `Blocked`.
    """

    def __init__(self, a: Window, b: Window, y: Window, *, add: bool = False, made: Made | None = None) -> None:
        if level() < Level.AVX2:
            raise Refused("oneDNN is faster")
        block = block_with_edges(*y.shape[-2:])
        super().__init__(a, b, y, add, made, (STEPS, TURN), (block.rows, block.columns))
        a_along, b_along = lies_along(a, -1), lies_along(b, -2)
        few = y.shape[-1] <= FEW * block.columns
        packs_a = not a_along and a.strides[-1] > NEAR and not few
        panels, given = self._panels(b, block), b.blocks is not None
        if given and b.blocks != panels:
            raise Refused(f"a matrix in the blocks {b.blocks}")
        packs_b = not given and (b_along or b.strides[-2] > NEAR or self.columns % block.columns > 0)
        self.wants = panels if packs_b else None
        edge = edge_of(block, self.rows, self.columns)
        self.form = Product(self.then, packs_a, packs_b, given, b_along, block, edge)
        if given:
            self.steps[1] = (align_up(self.columns, block.columns) * ITEM, self.most_steps * ITEM)
        kept = max(share.columns[1] - share.columns[0] for share in self.shares)
        numbers = KEPT_FOR_FEW if packs_b and self.rows <= FEW_ROWS and not packs_a else KEPT
        most = max(1, numbers // self.most_steps // block.columns) * block.columns
        self.most_kept = min(most, align_up(kept, block.columns))
        self.most_rows = min(ROWS, align_up(self.rows, block.rows)) if packs_a else self.rows
        rows = packs_a * self.most_rows // block.rows * block.packed
        self.packed = (packs_b * self.most_kept + rows) * self.most_steps * ITEM
        rows, columns = align_up(self.rows, block.rows), align_up(self.columns, block.columns)
        turns, passes = -(-self.depth // self.most_steps), -(-kept // self.most_kept)
        packed = self.depth * (packs_b * columns + packs_a * passes * rows)
        read = self.depth * (columns * (not packs_b and not given) + rows * (not packs_a))
        added = turns if add else turns - 1
        results = time_with_edges(block, edge, self.rows, self.columns) * WIDTH
        streamed = given * self.depth * columns
        self.nanoseconds += prices.panels(
            self.count, rows, columns, self.depth, results, packed + read / 2, streamed, added
        )

    def _panels(self, b: Window, block: Block) -> Blocks | None:
        """A matrix in C order, or transposed, in panels: all steps of one that are packed at once lie together."""
        for shape, turned in (((self.depth, self.columns), False), ((self.columns, self.depth), True)):
            dense = Window.dense(TensorType(FLOAT32, shape))
            if len(b.shape) == 2 and b.strides == (dense.strides[::-1] if turned else dense.strides):
                steps, columns = ("b", "a") if turned else ("a", "b")
                return Blocks(shape, f"{'BA' if turned else 'AB'}{self.most_steps}{steps}{block.columns}{columns}")
        return None

    def numbers(self, share: Share, a: int, b: int, y: int, scratch: int) -> dict[str, int]:
        """See `Blocked`."""
        return super().numbers(share, a, b, y, scratch) | {"most_rows": self.most_rows}
