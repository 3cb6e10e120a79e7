"""Blocks of the results of a product, as vector registers hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.base.units import align_up
from foreplan.runtime.cpu.codegen.loops import WIDTH
from foreplan.runtime.cpu.instructions import Level, level


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


WAIT = 8  # multiplications of registers that run at the same time
WORTH = 1.02  # how many times as long a product must take without smaller blocks at an edge

# The sums of a block, the vectors of a step of b and an element of a take as many registers as there are. With AVX-512
# a vector of sixteen is one register of 32; else it is two, or four, of 16.
_LARGE, _SMALL = (Block(8, 3), Block(6, 4), Block(12, 2)), (Block(6, 1),)


def block_for(rows: int, columns: int) -> Block:
    """The block for a product with so many results: the one that fills up the fewest."""
    return min(_blocks(), key=lambda each: align_up(rows, each.rows) * align_up(columns, each.columns))


def block_with_edges(rows: int, columns: int) -> Block:
    """The block for such a product where smaller blocks are at its edges: the one that takes the least time."""
    return min(_blocks(), key=lambda each: time_with_edges(each, edge_of(each, rows, columns), rows, columns))


def edge_of(block: Block, rows: int, columns: int) -> Block:
    """The rows behind the last whole block, and the vectors of the last columns; 0 where blocks are no smaller there,
    or where that would save less time than its own code is worth.
    """
    edge = Block(rows % block.rows, -(-(columns % block.columns) // WIDTH) % block.vectors)
    for without in (Block(0, edge.vectors), Block(edge.rows, 0), Block(0, 0)):
        now, then = (time_with_edges(block, each, rows, columns) for each in (edge, without))
        if then <= WORTH * now:
            edge = without
    return edge


def time_with_edges(block: Block, edge: Block, rows: int, columns: int) -> int:
    """Of each step along the sum, in multiplications of vectors: those of small blocks wait for one another."""
    least = min(block.rows * block.vectors, WAIT if level() >= Level.AVX512 else WAIT // 2)
    panels, whole = -(-columns // block.columns), block.rows * block.vectors
    row = panels * whole
    if edge.vectors:
        row += max(least, block.rows * edge.vectors) - whole
    last = panels * max(least, edge.rows * block.vectors) if edge.rows else row
    return rows // block.rows * row + (rows % block.rows > 0) * last


def _blocks() -> Sequence[Block]:
    return _LARGE if level() >= Level.AVX512 else _SMALL
