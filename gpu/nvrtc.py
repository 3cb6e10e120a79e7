"""Sources compiled to machine code for a card by NVRTC, which needs no card; kept on disk."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from foreplan.errors import TargetError
from foreplan.gpu.launch import FOLDER, Source, sources_digest
from foreplan.kept import keep, kept

_OPTIONS = ("--std=c++17", "--ptxas-options=-v")
_REPORTED = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s*.*?Used (\d+) registers", re.DOTALL
)


@dataclass(frozen=True)
class Compiled:
    """A source as machine code.

    Attributes:
        cubin: for one architecture.
        registers: of a thread.
        stack_bytes: of a thread, in device memory that the driver would set aside for all of them.
        spill_bytes: written to it and read from it for want of registers.
    """

    cubin: bytes
    registers: int
    stack_bytes: int
    spill_bytes: int


def architecture(compute: int) -> str:
    """The name of a compute capability's machine code: `sm_90` for 90."""
    return f"sm_{compute}"


@lru_cache(maxsize=4096)
def compiled(source: Source, architecture: str) -> Compiled:
    """A source compiled for an architecture such as `sm_90` or `sm_90a`.

    Raises:
        TargetError: NVRTC is not installed, or does not take the source or know the architecture.
    """
    nvrtc = _library()
    options = (*_OPTIONS, f"--gpu-architecture={architecture}")
    known_by = repr((nvrtc.getVersion(), options, sources_digest(), source.text, _REPORTED.pattern))
    name = f"cubin-{sha256(known_by.encode()).hexdigest()}"
    content = kept(name)
    if content is None:
        made = _compile(nvrtc, source, options)
        figures = [made.registers, made.stack_bytes, made.spill_bytes]
        keep(name, json.dumps(figures).encode() + b"\n" + made.cubin)
        return made
    first, _, cubin = content.partition(b"\n")
    return Compiled(cubin, *json.loads(first))


def _compile(nvrtc: Any, source: Source, options: tuple[str, ...]) -> Compiled:
    program = nvrtc.createProgram(source.text, f"for {source.file}", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"--include-path={FOLDER}"))
        cubin, said = nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip()
        raise TargetError(f"NVRTC {_version(nvrtc)} does not compile {source.file}: {error}\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)
    found = _REPORTED.findall(said)
    if len(found) != 1:
        raise TargetError(f"NVRTC {_version(nvrtc)} says nothing of registers and stack for {source.file}: {said!r}")
    stack, stores, loads, registers = map(int, found[0])
    return Compiled(cubin, registers, stack, stores + loads)


def _version(nvrtc: Any) -> str:
    return ".".join(map(str, nvrtc.getVersion()))


@lru_cache(maxsize=1)
def _library() -> Any:
    """CuPy's module for it, once it is known to work.

    Raises:
        TargetError: CuPy or NVRTC is not installed, or cannot be loaded.
    """
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # what is missing shows in different ways
        raise TargetError(
            f"kernels for cards are compiled by NVRTC, which cannot be loaded: {error}; install it with "
            "`pip install 'foreplan[cuda13]'` or 'foreplan[cuda12]' (in this repository: make setup-cuda)"
        ) from None
    return nvrtc


def missing() -> str:
    """Why nothing can be compiled here; empty if it can."""
    try:
        _library()
    except TargetError as error:
        return str(error)
    return ""
