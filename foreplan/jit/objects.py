"""Object files placed in memory without LLVM, whose libraries take 50 MiB and 30 ms: ELF, for 64-bit x86 on Linux, and
what of it LLVM writes for code that may lie anywhere (System V ABI, AMD64 supplement: code model "large").
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property

from foreplan.base.units import align_up

# See elf(5). The header's fields that count: the machine, where section headers begin; their number, which holds names.
_MAGIC, _X86_64 = b"\x7fELF\x02\x01\x01", 62
_MACHINE, _AT, _COUNT = 18, 40, 60
_SECTION, _SYMBOL, _RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4  # kinds of sections
_WRITE, _ALLOC = 1, 2  # flags
_UNDEFINED = 0  # the section of symbols that are elsewhere
_ABSOLUTE = 1  # R_X86_64_64: a symbol's address and a number
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
_NO_UNWINDING = ".eh_frame"  # tables for exceptions, which no code here throws


class _Foreign(Exception):
    """There is something in an object file that LLVM alone knows what to do with."""


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    offset: int
    nbytes: int
    link: int
    info: int
    alignment: int

    @property
    def placed(self) -> bool:
        """Whether code reads it."""
        return bool(self.flags & _ALLOC and self.nbytes and not self.name.startswith(_NO_UNWINDING))


@dataclass(frozen=True)
class _Symbol:
    name: str
    section: int
    value: int


class _Object:
    """An object file, read."""

    def __init__(self, code: bytes) -> None:
        (machine,) = struct.unpack_from("<H", code, _MACHINE)
        if not code.startswith(_MAGIC) or machine != _X86_64:
            raise _Foreign("another format")
        self.code = code
        (start,) = struct.unpack_from("<Q", code, _AT)
        count, names = struct.unpack_from("<HH", code, _COUNT)
        headers = [_SECTION.unpack_from(code, start + i * _SECTION.size) for i in range(count)]
        self.sections = [
            _Section(self._text(headers[names][4], name), kind, flags, offset, nbytes, link, info, max(1, alignment))
            for name, kind, flags, _, offset, nbytes, link, info, alignment, _ in headers
        ]
        if any(each.placed and (each.flags & _WRITE or each.kind != _PROGBITS) for each in self.sections):
            raise _Foreign("variables")
        self.places: dict[int, int] = {}
        self.nbytes = 0
        for i, each in enumerate(self.sections):
            if each.placed:
                self.places[i] = align_up(self.nbytes, each.alignment)
                self.nbytes = self.places[i] + each.nbytes

    @cached_property
    def symbols(self) -> list[_Symbol]:
        """Of the table that the format allows one of."""
        table = next((each for each in self.sections if each.kind == _SYMTAB), None)
        if table is None:
            raise _Foreign("no names")
        names = self.sections[table.link].offset
        return [
            _Symbol(self._text(names, name), section, value)
            for name, _, _, section, value, _ in _SYMBOL.iter_unpack(self._content(table))
        ]

    def address(self, symbol: _Symbol, start: int) -> int:
        """Where a symbol lies if the file's sections lie from `start` on."""
        if symbol.section == _UNDEFINED:
            return _known(symbol.name)
        if symbol.section not in self.places:
            raise _Foreign(f"a symbol in section {symbol.section}")
        return start + self.places[symbol.section] + symbol.value

    def image(self, start: int) -> bytes:
        """The sections as they lie from `start` on."""
        found = bytearray(self.nbytes)
        for i, at in self.places.items():
            found[at : at + self.sections[i].nbytes] = self._content(self.sections[i])
        for section, offset, symbol, kind, addend in self._relocations():
            if kind != _ABSOLUTE:
                raise _Foreign(f"relocation {kind}")
            address = self.address(self.symbols[symbol], start) + addend
            struct.pack_into("<Q", found, self.places[section] + offset, address % (1 << 64))
        return bytes(found)

    def _relocations(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Section, offset in it, index of the symbol, kind and what is added, of each."""
        for each in self.sections:
            if each.kind == _RELA and each.info in self.places:
                for offset, info, addend in _RELOCATION.iter_unpack(self._content(each)):
                    yield each.info, offset, info >> 32, info & 0xFFFFFFFF, addend

    def _content(self, section: _Section) -> bytes:
        found = self.code[section.offset : section.offset + section.nbytes]
        if len(found) != section.nbytes:
            raise _Foreign("a section that is not there")
        return found

    def _text(self, start: int, at: int) -> str:
        begin = start + at
        return self.code[begin : self.code.index(b"\0", begin)].decode()


def _known(name: str) -> int:
    """The address of a function of the C library, or of its mathematical part."""
    for library in _libraries():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except AttributeError:
            continue
    raise _Foreign(f"no function {name}")


@cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    return ctypes.CDLL(None), ctypes.CDLL("libm.so.6")


def address_of(code: bytes, name: str) -> int | None:
    """The address of a function of an object file, which is placed in memory for good; None: only LLVM can do it."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and struct.calcsize("P") == 8):
        return None
    try:
        found = _Object(code)
        entry = next(each for each in found.symbols if each.name == name and each.section != _UNDEFINED)
        with _pages(found.nbytes) as start:
            image = found.image(start)
            ctypes.memmove(start, image, len(image))
            return found.address(entry, start)
    except (_Foreign, struct.error, IndexError, ValueError, StopIteration, OSError):
        return None


@contextmanager
def _pages(nbytes: int) -> Iterator[int]:
    """The address of pages to write to, which can only be run afterwards."""
    libc = _libraries()[0]
    libc.mmap.restype, size = ctypes.c_void_p, ctypes.c_size_t(nbytes)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, ctypes.c_long(0))
    if start in (None, _FAILED):
        raise _Foreign("no memory")
    try:
        yield start
        if libc.mprotect(ctypes.c_void_p(start), size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise _Foreign("memory that may not be run")
    except BaseException:
        libc.munmap(ctypes.c_void_p(start), size)
        raise
