"""Tile registers in memory, so that products on them are tested on any processor.

Instructions do what Intel's manual says of them ("Architecture Instruction Set Extensions Programming Reference",
chapter 3: LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS), for tiles of 16 rows of 64 bytes. Sums of 32 products
are rounded once, as processors round them; the manual lets each product be rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import llvmlite.ir as ir
import pytest

from foreplan.jit.builder import DOUBLE, FLOAT, I16, I32, I64
from foreplan.runtime.cpu.gemm import tiles
from foreplan.runtime.cpu.gemm.nest import Nest
from foreplan.runtime.cpu.gemm.tiles_loop import Product, _Product

ROWS, ROW = 16, 64  # of a tile, and bytes of one
TILES = 8
_LINE = ir.VectorType(FLOAT, ROW // 4)


@dataclass(frozen=True)
class InMemory(Product):
    """The form of a product on such tiles; machine code is kept by this file, too."""

    written_by: str = Path(__file__).read_text()

    @property
    def nest(self) -> type[Nest]:
        """See `Form`."""
        return _InMemory


class _InMemory(_Product):
    """Writes memory's instructions in place of a processor's."""

    registers: ir.Value | None = None

    def tiles(self, name: str, *values: ir.Value | int) -> None:
        """An instruction on tile registers, which are named by numbers."""
        getattr(self, name)(*values)

    def ldtilecfg(self, _: ir.Value) -> None:
        """Tiles are made, full of what no product holds."""
        self.registers = self.b.local(ir.ArrayType(FLOAT, TILES * ROWS * ROW // 4))
        nan = ir.Constant(_LINE, [float("nan")] * _LINE.count)
        with self.b.counted(0, ir.Constant(I64, TILES * ROWS)) as row:
            self.b.store(nan, self.b.behind(self.registers, self.b.mul(row, ROW)), align=4)

    def tilerelease(self) -> None:
        """There are no tiles any more."""
        self.registers = None

    def tilezero(self, tile: int) -> None:
        """A tile becomes zero."""
        with self.b.counted(0, ir.Constant(I64, ROWS)) as row:
            self.b.store(ir.Constant(_LINE, None), self.row(tile, row), align=4)

    def tileloadd64(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """A tile is read."""
        with self.b.counted(0, ir.Constant(I64, ROWS)) as row:
            there = self.b.behind(address, self.b.mul(row, stride))
            self.b.store(self.b.load(there, align=1, typ=_LINE), self.row(tile, row), align=4)

    def tilestored64(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """A tile is written."""
        with self.b.counted(0, ir.Constant(I64, ROWS)) as row:
            there = self.b.behind(address, self.b.mul(row, stride))
            self.b.store(self.b.load(self.row(tile, row), align=4, typ=_LINE), there, align=1)

    def tdpbf16ps(self, result: int, a: int, b: int) -> None:
        """32 products of bfloat16 are added to each number, which is then rounded."""
        e, wide = self.b, ir.VectorType(DOUBLE, _LINE.count)
        with e.counted(0, ir.Constant(I64, ROWS)) as row:
            place = self.row(result, row)
            total = e.fpext(e.load(place, align=4, typ=_LINE), wide)
            for pair in range(ROW // 4):
                ours, theirs = self.row(a, row), self.row(b, e.index(pair))
                words = e.load(theirs, align=4, typ=ir.VectorType(I32, _LINE.count))
                for half, others in enumerate((e.shl(words, 16), e.and_(words, 0xFFFF0000))):
                    bits = e.load(e.behind(ours, 4 * pair + 2 * half), align=2, typ=I16)
                    one = self.all_lanes(e.bitcast(e.shl(e.zext(bits, I32), 16), FLOAT))
                    total = e.fadd(total, e.fmul(e.fpext(one, wide), e.fpext(e.bitcast(others, _LINE), wide)))
            e.store(e.fptrunc(total, _LINE), place, align=4)

    def all_lanes(self, x: ir.Value) -> ir.Value:
        """A number in every lane."""
        undefined, lanes = ir.Constant(_LINE, ir.Undefined), ir.VectorType(I32, _LINE.count)
        one = self.b.insert_element(undefined, x, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(lanes, None))

    def row(self, tile: int, row: ir.Value) -> ir.Value:
        """Where a tile's row lies."""
        assert self.registers is not None, "no tiles are configured"
        return self.b.behind(self.registers, self.b.mul(self.b.add(row, tile * ROWS), ROW))


def in_memory(monkeypatch: pytest.MonkeyPatch) -> type[tiles.Tiles]:
    """Let products on tiles be made on such."""
    monkeypatch.setattr(tiles, "available", lambda: True)
    monkeypatch.setattr(tiles, "Product", InMemory)
    return tiles.Tiles
