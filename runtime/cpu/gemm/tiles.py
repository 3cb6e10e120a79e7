"""Products of float32 matrices on tile registers, each number as the sum of three of bfloat16 (see `tiles_loop`).

Errors are below those of sums in float32: a tile adds up 32 products before it rounds, and sums of 512 are added up.
NaN and infinities are right, except that infinity times infinity is NaN. Parts below 1e-38 count as zero.
"""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache

from foreplan.base import processor
from foreplan.base.units import align_up
from foreplan.graph import Window
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import Made
from foreplan.runtime.cpu.gemm.blocked import Blocked, Share, lies_along
from foreplan.runtime.cpu.gemm.tiles_loop import DEPTH, SIDE, STEP, Product
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.runtime.kernel import Refused

STEPS = 512  # steps along the sum that are packed at once, at most
KEPT = 2**17  # packed numbers that are kept, at most: with those that pass, half of a core's cache
PAGE = 4096  # bytes; lines at this distance share a set of the first cache
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # Linux: a process asks for the registers before it uses them


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this process may use tile registers."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or level() < Level.AMX:
        return False
    if not processor.has("amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


class Tiles(Blocked):
    """A product in blocks of tiles: see `Blocked`.

    Raises:
        Refused: there are no tile registers; an operand has no axis with elements side by side; or see `Blocked`.
    """

    def __init__(self, a: Window, b: Window, y: Window, *, add: bool = False, made: Made | None = None) -> None:
        if not available():
            raise Refused("there are no tile registers")
        super().__init__(a, b, y, add, made, (STEPS, DEPTH), (SIDE, SIDE))
        self.a_along, self.b_along = lies_along(a, -1), lies_along(b, -2)
        self.most_kept = KEPT // self.most_steps // SIDE * SIDE
        keeps_a = self._keeps_a()
        self.form = Product(self.then, self.a_along, self.b_along, keeps_a)
        kept = max(high - low for low, high in (x.rows if keeps_a else x.columns for x in self.shares))
        self.most_kept = min(self.most_kept, align_up(kept, SIDE))
        self.packed = (2 + self.most_kept // SIDE) * (self.most_steps // DEPTH) * STEP
        packed = self._passes(*((self.rows, self.columns) if keeps_a else (self.columns, self.rows)))
        self.nanoseconds += prices.tiles(self.count, self.rows, self.columns, self.depth, packed)

    def _keeps_a(self) -> bool:
        """Whether a is kept while b passes: if all of a is kept; or if less is packed so, and a's rows are not in the
        order of packing, which is fetched ahead best.
        """
        fewer = self._passes(self.rows, self.columns) <= self._passes(self.columns, self.rows)
        return self.rows < self.columns and (self.rows <= self.most_kept or (fewer and not self.a_along))

    def _passes(self, kept: int, passing: int) -> int:
        """Rows and columns that are packed, if `kept` are kept in turns while all of `passing` pass."""
        return kept + -(-kept // self.most_kept) * passing

    def numbers(self, share: Share, a: int, b: int, y: int, scratch: int) -> dict[str, int]:
        """See `Blocked`."""
        found = super().numbers(share, a, b, y, scratch)
        return found | {
            "a_following": _following(found["a_row"], found["a_step"], self.a_along),
            "b_following": _following(found["b_column"], found["b_step"], self.b_along),
        }


def _following(across: int, along: int, is_along: bool) -> int:
    """Bytes to the unit that is fetched ahead: that of the next panel; or the next one of the same panel, if the lines
    of both would share sets of a cache.
    """
    return DEPTH * along if not is_along and along % PAGE == 0 else SIDE * across
