"""Lines of memory that leave every cache, as machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import llvmlite.ir as ir

from foreplan.runtime.cpu.codegen.lanes import Lanes
from foreplan.runtime.cpu.codegen.llvm import compiled_as
from foreplan.runtime.cpu.codegen.loops import Writer

LINE = 64  # bytes


@cache
def compiled_flush() -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for lines [start, stop) from the table's address on."""
    return compiled_as("flush", lambda: _Flush().written())


class _Flush(Writer):
    """Writes such a loop."""

    def write(self) -> None:
        """All of it."""
        b, e = self.b, Lanes(self.b)
        base = self.entry(0)
        with self.counted(self.start, self.stop, 1) as line:
            address = b.add(base, b.mul(line, self.number(LINE)))
            e.call("llvm.x86.sse2.clflush", ir.VoidType(), b.inttoptr(address, ir.PointerType()))
        b.ret_void()
