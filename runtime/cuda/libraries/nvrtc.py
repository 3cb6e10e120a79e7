"""Machine code for cards: cubins by NVRTC, or by nvcc, neither of which needs a card; kept on disk.

The needs of a kernel (registers, stack) are read from the cubin, for both compilers.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from foreplan.base.disk_cache import file_name, keep, kept
from foreplan.base.errors import ForeplanError, TargetError
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.launch import FOLDER, Source, sources_digest
from foreplan.runtime.cuda.libraries.libraries import library_files

_ADVICE = "install the wheel nvidia-cuda-nvrtc, or CUDA's nvcc"
_COMPILATION = 6  # NVRTC_ERROR_COMPILATION: an error in a source; all other errors are of NVRTC itself
_TRIAL = "__global__ void trial() {}"


@dataclass(frozen=True)
class Figures:
    """What a kernel needs of each thread.

    Attributes:
        registers: of 32 bits.
        stack: bytes of local memory, of spilled registers among other things.
    """

    registers: int
    stack: int


class Compiler(Protocol):
    """Makes cubins.

    Attributes:
        version: changes with the code that it makes.
    """

    version: str

    def compile(self, source: Source, architecture: str) -> bytes:
        """The cubin of a translation unit.

        Raises:
            CompilationError: with what the compiler says.
            TargetError: the compiler itself fails, such as by a library that it does not find.
        """


class CompilationError(ForeplanError):
    """A kernel that a CUDA compiler refuses: a fault of foreplan, or a compiler that is too old."""


class Nvcc:
    """The compiler driver of CUDA's toolkit."""

    def __init__(self, path: str) -> None:
        """The one at a path.

        Raises:
            TargetError: it cannot be run.
        """
        self.path = path
        done = self._run("--version")
        if done.returncode:
            raise TargetError(f"{path} cannot be used: {done.stderr.strip()[:400]}")
        self.version = done.stdout

    def _run(self, *options: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([self.path, *options], capture_output=True, text=True)
        except OSError as error:
            raise TargetError(f"{self.path} cannot be run: {error}") from None

    def compile(self, source: Source, architecture: str) -> bytes:
        """See `Compiler`."""
        with tempfile.TemporaryDirectory() as folder:
            file, made = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
            file.write_text(source.text)
            options = [*source.options, "-cubin", f"-arch={architecture}", f"-I{FOLDER}", "-o", str(made), str(file)]
            done = self._run(*options)
            if done.returncode:
                raise CompilationError(f"{self.path} cannot compile a kernel for {architecture}:\n{done.stderr[:4000]}")
            return made.read_bytes()


class Nvrtc:
    """The library that compiles at run time.

    Attributes:
        path: its file.
    """

    def __init__(self, path: str) -> None:
        """Loads a file, and the library of built-in functions beside it.

        Raises:
            OSError: it is no library that can be loaded.
            TargetError: it is loaded, and cannot compile; says what is missing.
        """
        self.path, self.library = path, ctypes.CDLL(path)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"NVRTC {major.value}.{minor.value}"
        self._built_in = _built_in(path, f"{major.value}.{minor.value}")
        self._compiled(_TRIAL, [], lambda _: b"")

    def compile(self, source: Source, architecture: str) -> bytes:
        """See `Compiler`."""
        options = [*source.options, f"--gpu-architecture={architecture}", f"--include-path={FOLDER}"]
        take = partial(self._read, self.library.nvrtcGetCUBINSize, self.library.nvrtcGetCUBIN)
        return self._compiled(source.text, options, take)

    def _compiled(self, text: str, given: list[str], take: Callable[[ctypes.c_void_p], bytes]) -> bytes:
        library, program = self.library, ctypes.c_void_p()
        self._check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
        options = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        try:
            if status := library.nvrtcCompileProgram(program, len(given), options):
                log = self._read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
                said = log.rstrip(b"\0").decode(errors="replace").strip()[:4000]
                if status != _COMPILATION:
                    self._check(status, said)
                raise CompilationError(f"{self.version} cannot compile a kernel with {' '.join(given)}:\n{said}")
            return take(program)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _check(self, status: int, said: str = "") -> None:
        """
        Raises:
            TargetError: something failed.
        """
        if not status:
            return
        reason = self.library.nvrtcGetErrorString(status).decode()
        raise TargetError(
            f"{self.version} ({self.path}) cannot compile: {reason} {said}; its library of built-in functions "
            f"{self._built_in}: install the wheel nvidia-cuda-nvrtc anew, or CUDA's nvcc"
        )

    def _read(self, size_of: Callable[..., int], read: Callable[..., int], program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_of(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(read(program, content))
        return content.raw


def _built_in(path: str, version: str) -> str:
    """Load the library of built-in functions that lies beside NVRTC; returns the result as text.

    NVRTC opens it by its name when it compiles. In the wheel of CUDA 13.0 nothing tells the system's loader to look
    beside NVRTC; but the loader finds a library that is already loaded.
    """
    name = f"libnvrtc-builtins.so.{version}"
    for folder in dict.fromkeys((Path(path).parent, Path(path).resolve().parent)):
        if (folder / name).exists():
            try:
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
                return f"{folder / name} is loaded"
            except OSError as error:
                return f"{name} cannot be loaded: {error}"
    return f"{name} is not beside it"


@lru_cache(maxsize=1)
def compiler() -> Compiler:
    """NVRTC, if it is installed and compiles; else nvcc, if it is on the path, which takes more than twice as long.

    Raises:
        TargetError: there is neither; or what fails in those that are installed.
    """
    failed = []
    for found in library_files("nvrtc"):
        try:
            return Nvrtc(found)
        except (OSError, TargetError) as error:
            failed.append(str(error))
    if path := shutil.which("nvcc"):
        try:
            return Nvcc(path)
        except TargetError as error:
            failed.append(str(error))
    there = "none that works: " + "; ".join(dict.fromkeys(failed)) if failed else "none"
    raise TargetError(f"kernels for cards need a CUDA compiler, and there is {there}; {_ADVICE}")


def architecture_of(device: Device) -> str:
    """The name of a card for compilers: `sm_90`."""
    return f"sm_{device.compute}"


def key_of(source: Source, architecture: str) -> str:
    """The key of machine code, the same for both compilers: text, all of cuda/, options and architecture."""
    about = (source.options, architecture, sources_digest(), source.text)
    return hashlib.sha256(repr(about).encode()).hexdigest()


@lru_cache(maxsize=4096)
def cubin(source: Source, architecture: str) -> bytes:
    """Machine code of a source for an architecture such as `sm_90`, from disk if it was made before.

    Raises:
        TargetError: there is no CUDA compiler.
        CompilationError: it refuses the source.
    """
    about = f"{compiler().version}\n{key_of(source, architecture)}"
    name = file_name(about, "cubin")
    code = kept(name)
    if code is None:
        code = compiler().compile(source, architecture)
        keep(name, code)
    return code


# Attributes of a cubin's kernels: a number each, by the kernel's symbol. The form of a value: behind its length.
_FRAME_SIZE, _REGISTERS, _WITH_LENGTH = 0x11, 0x2F, 0x04


def figures(code: bytes) -> Mapping[str, Figures]:
    """The needs of each kernel of a cubin, by its name.

    A cubin is an ELF file. The section `.text.NAME` of a kernel has the number of its symbol in `sh_info`, and above
    that, for older architectures, its registers; the section `.nv.info` lists attributes by symbol (as
    `cuobjdump -elf` shows).

    Raises:
        ValueError: it is no cubin.
    """
    try:
        sections = list(_sections(code))
        listed = b"".join(content for name, _, content in sections if name == ".nv.info")
        attributes = {(attribute, symbol): number for attribute, symbol, number in _attributes(listed)}
    except (struct.error, IndexError) as error:
        raise ValueError(f"no machine code of a card: {error}") from None
    found = {}
    for name, info, _ in sections:
        if name.startswith(".text."):
            symbol = info & 0xFFFFFF
            registers = attributes.get((_REGISTERS, symbol), info >> 24)
            found[name.removeprefix(".text.")] = Figures(registers, attributes.get((_FRAME_SIZE, symbol), 0))
    return MappingProxyType(found)


def _sections(code: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Name, `sh_info` and content of each section of a 64-bit ELF file, little end first."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    names = headers[of_names][4]
    for name, type, _, _, offset, nbytes, _, info, *_ in headers:
        start = names + name
        content = b"" if type == _NO_BITS else code[offset : offset + nbytes]
        yield code[start : code.index(b"\0", start)].decode(), info, content


_NO_BITS = 8  # the type of a section without content in the file


def _attributes(listed: bytes) -> Iterator[tuple[int, int, int]]:
    """Attribute, symbol and number of each entry that has these."""
    at = 0
    while at + 4 <= len(listed):
        how, attribute, size = struct.unpack_from("<BBH", listed, at)
        at += 4
        if how == _WITH_LENGTH:
            if size == 8:
                yield (attribute, *struct.unpack_from("<II", listed, at))
            at += size
