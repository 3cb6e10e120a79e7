"""Kernels of cuda/ as machine code of this processor: g++ compiles them with a header that stands in for CUDA.

g++ takes 0.1 s to begin, with that header compiled beforehand, and a few hundredths for most kernels. Who needs many
asks for all of them at once (`compile_all`). Each then has a namespace of its own in one library.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from foreplan.runtime.cuda.launch import FOLDER, Instruction, Launch, Source
from tests.processor_time import uncounted

HEADER = Path(__file__).parent / "shim" / "cuda.h"
OPTIONS = ("-std=c++17", "-O0", "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w")
TOGETHER = 32  # sources in one library: then the beginning of g++ is no longer what takes the time

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are run on the CPU through g++: install it")

_INCLUDE = re.compile(r'#include "(.+)"')
_ENTRY = re.compile(r'^extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(', re.MULTILINE)
_NAMED = re.compile(r"^#define (\w+)", re.MULTILINE)


@lru_cache(maxsize=1)
def _cache() -> Path:
    """Where compiled kernels are kept between runs: by what they were made from."""
    folder = Path(tempfile.gettempdir()) / f"foreplan-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@lru_cache(maxsize=1)
def _surroundings() -> str:
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    return "\n".join([version, *OPTIONS, HEADER.read_text()])


@lru_cache(maxsize=1)
def _header() -> Path:
    """The header, compiled: g++ takes `name.gch` for `name` if its options are the same."""
    header = _cache() / f"cuda-{hashlib.sha256(_surroundings().encode()).hexdigest()[:32]}.h"
    compiled = header.with_suffix(".h.gch")
    if not compiled.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            made = Path(folder) / "cuda.h.gch"
            subprocess.run(["g++", *OPTIONS, "-x", "c++-header", str(HEADER), "-o", str(made)], check=True)
            own = Path(folder) / "cuda.h"
            own.write_text(HEADER.read_text())
            own.replace(header)
            made.replace(compiled)
    return header


def _with_included(text: str, folder: Path, seen: set[str]) -> str:
    """A text with its files in the place of what includes them, each once; lines keep their numbers."""
    found = []
    for number, line in enumerate(text.splitlines(), 2):
        included = _INCLUDE.fullmatch(line)
        if included is None:
            found.append("" if line == "#pragma once" else line)
        elif included[1] not in seen:
            seen.add(included[1])
            inner = _with_included((folder / included[1]).read_text(), folder, seen)
            found.append(f'#line 1 "{included[1]}"\n{inner}\n#line {number}')
    return "\n".join(found)


@lru_cache(maxsize=4096)
def _text(source: Source, folder: Path) -> str:
    """All of a source, but for the header."""
    return _with_included(source.text, folder, set())


@lru_cache(maxsize=4096)
def _name(source: Source, folder: Path) -> str:
    """What a compiled source is known by."""
    return "k" + hashlib.sha256(f"{_surroundings()}\n{_text(source, folder)}".encode()).hexdigest()[:32]


def _path(source: Source) -> Path:
    return _cache() / f"{source.file.partition('.')[0]}-{_name(source, FOLDER)}.so"


def _namespace(source: Source) -> str:
    """A source in a namespace of its own, whose macros end with it."""
    text, name = _text(source, FOLDER), _name(source, FOLDER)
    entries = [dict(source.defines).get(entry, entry) for entry in _ENTRY.findall(text)]
    inner = text.replace('extern "C" ', "")
    macros = "".join(f"#undef {macro}\n" for macro in dict.fromkeys(_NAMED.findall(text)))
    ends = "".join(f"SHIM_ENTRY({name}, {entry})\n" for entry in entries)
    return f"#define SHIM_UNIT {name}\nnamespace {name} {{\n{inner}\n}}\n{macros}{ends}#undef SHIM_UNIT\n"


def compile_all(sources: Iterable[Source]) -> None:
    """Compile those that are not kept yet, many at a time."""
    missing = sorted((source for source in set(sources) if not _path(source).exists()), key=repr)
    for i in range(0, len(missing), TOGETHER):
        with uncounted():  # they are kept from one run to the next
            _compile(missing[i : i + TOGETHER])


def not_kept(instructions: Iterable[Instruction]) -> set[Source]:
    """What all of these launch and is not compiled yet."""
    return {each.source for each in instructions if isinstance(each, Launch) and not _path(each.source).exists()}


def compile_launched(instructions: Iterable[Instruction]) -> None:
    """Compile what all of these launch."""
    compile_all(each.source for each in instructions if isinstance(each, Launch))


def _compile(sources: Sequence[Source]) -> None:
    text = "".join(map(_namespace, sources))
    with tempfile.TemporaryDirectory(dir=_cache()) as folder:
        made = Path(folder) / "made.so"
        command = ["g++", *OPTIONS, "-include", str(_header()), "-x", "c++", "-", "-o", str(made)]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr[:4000]}\n{[source.text for source in sources]}"
        for source in sources:  # the same file under the name of each
            own = Path(folder) / "own.so"
            own.hardlink_to(made)
            own.replace(_path(source))


@lru_cache(maxsize=4096)
def function(source: Source, entry: str) -> tuple[Callable[..., bytes | None], int]:
    """What runs a kernel, and how many bytes of arguments it takes."""
    compile_all([source])
    loaded, name = ctypes.CDLL(str(_path(source))), _name(source, FOLDER)
    run, size = getattr(loaded, f"shim_run_{name}_{entry}"), getattr(loaded, f"shim_size_{name}_{entry}")
    run.restype = ctypes.c_char_p
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
    size.restype = ctypes.c_uint64
    return run, size()
