"""Machine code for this processor: kept on disk, under a name made from all that it depends on, and placed in memory.
LLVM is loaded where there is something to compile.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import llvmlite

from foreplan.base import processor
from foreplan.base.disk_cache import claim, file_name, keep, kept, release
from foreplan.base.once import once
from foreplan.jit.objects import address_of

if TYPE_CHECKING:
    from foreplan.jit.llvm import Passes


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, ...]:
    """What all machine code here depends on: versions, and the processor."""
    about = processor.instructions()
    if not about:
        from foreplan.jit import llvm

        about = llvm.processor()
    return llvmlite.__version__, sys.platform, platform.machine(), *about


@dataclass(frozen=True)
class Module:
    """A module to compile.

    Attributes:
        name: of the function that is called in it.
        key: all that it is made from, but versions and the processor.
        write: gives it in LLVM's intermediate representation, and a line that is kept with its machine code.
        what: what it is a part of, for people.
        passes: how much LLVM does before it makes machine code: "none" for loops that are written as they should run,
            "few" for long functions that compute with integers, "usual", or "loops", which also looks for loops that
            may work on several elements at once.
        without: features of the processor that it does not use, as LLVM names them: `-avx512f`.
    """

    name: str
    key: str
    write: Callable[[], tuple[str, str]]
    what: str = "loops"
    passes: Passes = "usual"
    without: str = ""

    @cached_property
    def file(self) -> str:
        """Under what name its machine code is kept."""
        about = "\n".join((*_compiler(), self.without, self.passes, self.key))
        return file_name(about, "o", self.name)


def loaded(module: Module, *, store: bool = True) -> tuple[int, str]:
    """The address of a module's function, whose machine code is read from disk, or else made and kept; and its line.

    Args:
        store: whether to keep the machine code on disk.
    """
    content = kept(module.file) if store else None
    if content is None:
        with once(module.what):
            content = _made(module, store)
    line, _, code = content.partition(b"\n")
    address = address_of(code, module.name)
    if address is None:
        from foreplan.jit import llvm

        address = llvm.address_of(code, module.name)
    return address, line.decode()


def _made(module: Module, store: bool) -> bytes:
    """A module's line and machine code. One process makes it, and others wait until it is on disk."""
    try:
        if store:
            claim(module.file)
            if (content := kept(module.file)) is not None:
                return content
        text, line = module.write()
        content = line.encode() + b"\n" + _machine_code(text, module)
        if store:
            keep(module.file, content)
        return content
    finally:
        release(module.file)


def _machine_code(text: str, module: Module) -> bytes:
    """An object file."""
    from foreplan.jit import llvm

    return llvm.machine_code(text, module.passes, module.without)
