"""Lines of memory that leave every cache, as machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import llvmlite.ir as ir

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
        b, base = self.b, self.entry(0)
        with b.counted(self.start, self.stop) as line:
            address = b.add(base, b.mul(line, LINE))
            b.named("llvm.x86.sse2.clflush", ir.VoidType(), b.pointer(address))
        b.ret_void()
