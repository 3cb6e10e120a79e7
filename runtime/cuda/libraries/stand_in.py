"""A library that stands in for the driver's (libcuda.so.1), for a process that plans and runs nothing on any card.

cuDNN 9.19 has engines for attention that need only NVRTC to compile, for any described card. Yet it refuses them
(`this->libcuda == nullptr`) unless it can load the driver's library with 25 functions. While it plans, one of these
must load the compiled code and another must find the kernel in it, with handles that are not null. Nothing of a driver
enters a plan. The CUDA runtime also finds this library, which tells it that there is no card.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_SONAME = b"libcuda.so.1"
# x86-64: mov [rdi], rdi; xor eax, eax; ret. The first argument says where a handle goes: any that is not null.
_GIVES = bytes.fromhex("48893f31c0c3")
# lea rax, [rip + 6]; mov [rsi], rax; xor eax, eax; ret: the second argument says where the address of "?" goes.
_NAMES = bytes.fromhex("488d050600000048890631c0c3") + b"?\0"
_SUCCEEDS = bytes.fromhex("31c0c3")
_FAILS = bytes.fromhex("b864000000c3")  # mov eax, CUDA_ERROR_NO_DEVICE; ret
_WITHOUT_A_CARD = """cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGet cuDeviceGetCount
cuDriverGetVersion cuInit cuKernelGetAttribute cuKernelSetAttribute cuLaunchCooperativeKernel cuLaunchKernel
cuLaunchKernelEx cuLibraryLoadFromFile cuLinkAddData cuLinkComplete cuLinkCreate cuLinkDestroy
cuOccupancyMaxPotentialClusterSize cuStreamGetCtx"""
_FUNCTIONS = {
    **dict.fromkeys(("cuLibraryLoadData", "cuLibraryGetKernel"), _GIVES),
    **dict.fromkeys(("cuGetErrorName", "cuGetErrorString"), _NAMES),
    "cuLibraryUnload": _SUCCEEDS,
    **dict.fromkeys(_WITHOUT_A_CARD.split(), _FAILS),
}
_SLOT = 16  # bytes of code a function
_PAGE = 4096
# Of the ELF format (System V ABI): what is used of it.
_DYNAMIC_OBJECT, _X86_64 = 3, 62
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_HASH, _STRINGS, _SYMBOLS, _STRINGS_SIZE, _SYMBOL_SIZE, _NAME = 4, 5, 6, 10, 11, 14
_HEADER, _SEGMENT, _SYMBOL = 64, 56, 24  # bytes


def can_stand_in() -> bool:
    """Whether this machine has the processor and the system that the library is for."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def load() -> None:
    """Load it into this process for good, in place of the driver's: from now on it is found by that name.

    Raises:
        OSError: it cannot be loaded.
    """
    with open(os.memfd_create("libcuda"), "wb") as file:
        file.write(image())
        file.flush()
        ctypes.CDLL(f"/proc/self/fd/{file.fileno()}", mode=ctypes.RTLD_GLOBAL)


def image() -> bytes:
    """The library: an ELF file of one page of headers, names and code, and one of the dynamic section."""
    names = [name.encode() for name in _FUNCTIONS]
    strings, starts = b"\0", []
    for name in (*names, _SONAME):
        starts.append(len(strings))
        strings += name + b"\0"
    count = 1 + len(names)  # symbol 0 is none
    # A table of one bucket: a chain through all symbols.
    table = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)
    at_symbols = _HEADER + 4 * _SEGMENT
    at_table = at_symbols + count * _SYMBOL
    at_strings = at_table + len(table)
    at_code = -(-(at_strings + len(strings)) // _SLOT) * _SLOT
    symbols = bytes(_SYMBOL)
    for i, start in enumerate(starts[:-1]):
        symbols += struct.pack("<IBBHQQ", start, 0x12, 0, 1, at_code + i * _SLOT, _SLOT)  # a global function
    code = b"".join(each.ljust(_SLOT, b"\xcc") for each in _FUNCTIONS.values())
    entries = [
        (_NAME, starts[-1]),
        (_HASH, at_table),
        (_STRINGS, at_strings),
        (_SYMBOLS, at_symbols),
        (_STRINGS_SIZE, len(strings)),
        (_SYMBOL_SIZE, _SYMBOL),
        (0, 0),
    ]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    first = at_code + len(code)
    assert first <= _PAGE
    segments = [
        (_LOAD, 5, 0, first),  # what it is, whether it is read (4), written (2) and run (1), where, and its bytes
        (_LOAD, 6, _PAGE, len(dynamic)),
        (_DYNAMIC, 6, _PAGE, len(dynamic)),
        (_STACK, 6, 0, 0),
    ]
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", _DYNAMIC_OBJECT, _X86_64, 1, 0, _HEADER, 0, 0, _HEADER, _SEGMENT, len(segments), 0, 0, 0
    )
    for kind, rights, at, nbytes in segments:
        header += struct.pack("<IIQQQQQQ", kind, rights, at, at, at, nbytes, nbytes, _PAGE)
    first_page = (header + symbols + table + strings).ljust(at_code, b"\0") + code
    return first_page.ljust(_PAGE, b"\0") + dynamic
