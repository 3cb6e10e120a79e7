"""The instructions that code is made of: the processor's, or fewer where `ONEDNN_MAX_CPU_ISA` tells oneDNN so."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

from foreplan.runtime.cpu.onednn.library import library


class Level(IntEnum):
    """Sets of instructions, each of which has those before it."""

    SSE41 = 0
    AVX = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_BF16 = 4
    AMX = 5


_NAMES = {  # as oneDNN's begin
    "AMX": Level.AMX,
    "AVX-512 with bfloat16": Level.AVX512_BF16,
    "AVX-512 with float16": Level.AVX512_BF16,
    "AVX-512": Level.AVX512,
    "AVX2": Level.AVX2,
    "AVX": Level.AVX,
}
# LLVM's names of what code of older sets lacks. A feature that needs one of them goes with it.
_LACKED = {Level.SSE41: "-avx,-avx2,-fma,-f16c", Level.AVX: "-avx2,-fma", Level.AVX2: "-avx512f"}


@lru_cache(maxsize=1)
def level() -> Level:
    """The level of oneDNN's code on this machine."""
    isa = library().isa
    return next((level for name, level in _NAMES.items() if isa.startswith(name)), Level.SSE41)


def lacked() -> str:
    """The features that code must not use, as LLVM names them; empty: it may use all of this processor."""
    return _LACKED.get(level(), "")
