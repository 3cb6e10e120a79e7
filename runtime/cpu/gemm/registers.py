"""Blocks of the results of a product, as vector registers hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.runtime.cpu.codegen.loops import WIDTH
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.units import align_up


@dataclass(frozen=True)
class Block:
    """The results that registers hold.

    Attributes:
        rows: their number.
        vectors: of sixteen columns.
    """

    rows: int
    vectors: int

    @property
    def columns(self) -> int:
        """Their number."""
        return self.vectors * WIDTH

    @property
    def packed(self) -> int:
        """Elements of a step of packed rows: half a vector, or a whole one."""
        return WIDTH // 2 if self.rows <= WIDTH // 2 else WIDTH


# The sums of a block, the vectors of a step of b and an element of a take as many registers as there are. With AVX-512
# a vector of sixteen is one register of 32; else it is two, or four, of 16.
_LARGE, _SMALL = (Block(8, 3), Block(6, 4), Block(12, 2)), (Block(6, 1),)


def block_for(rows: int, columns: int) -> Block:
    """The block for a product with so many results: the one that fills up the fewest."""
    blocks: Sequence[Block] = _LARGE if level() >= Level.AVX512 else _SMALL
    return min(blocks, key=lambda each: align_up(rows, each.rows) * align_up(columns, each.columns))
