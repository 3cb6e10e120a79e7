"""Machine code is placed in memory without LLVM, and runs as LLVM's own loader lets it run."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as binding
import llvmlite.ir as ir
import numpy as np
import pytest

from foreplan.jit import llvm, objects

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="needs Linux on 64-bit x86: elsewhere LLVM loads it",
)
# A table of constants, constants by themselves, and functions of both libraries; the sum of what they give.
TEXT = """
target triple = "unknown-unknown-unknown"
target datalayout = ""
@numbers = private constant [4 x double] [double 1.5, double 2.5, double 3.5, double 4.5]
declare double @cbrt(double)
declare ptr @memset(ptr, i32, i64)
define double @twice(double %x) {
  %y = fmul double %x, 2.0
  ret double %y
}
define double @entry(i64 %i, double %x) {
  %memory = alloca [64 x double]
  %first = getelementptr double, ptr @numbers, i64 %i
  %number = load double, ptr %first
  call ptr @memset(ptr %memory, i32 0, i64 512)
  %last = getelementptr double, ptr %memory, i64 %i
  %zero = load double, ptr %last
  %root = call double @cbrt(double %x)
  %double = call double @twice(double %root)
  %one = fadd double %number, %double
  %two = fadd double %one, %zero
  %three = fadd double %two, 0.25
  ret double %three
}
"""
Entry = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64, ctypes.c_double)


@pytest.fixture(scope="module")
def code() -> bytes:
    return llvm.machine_code(TEXT, "none")


def test_constants_and_calls(code: bytes) -> None:
    own, llvms = objects.address_of(code, "entry"), llvm.address_of(code, "entry")
    assert own is not None and own != llvms
    for i in range(4):
        assert Entry(own)(i, 27.0) == Entry(llvms)(i, 27.0) == pytest.approx(i + 1.5 + 2 * 3.0 + 0.25)


def test_code_cannot_be_written_once_it_runs(code: bytes) -> None:
    address = objects.address_of(code, "entry")
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, kind = line.split()[:2]
        first, last = (int(end, 16) for end in ends.split("-"))
        if first <= address < last:
            assert kind == "r-xp"


def test_modules_are_compiled_for_this_machine() -> None:
    """Which `llvmlite.ir` does not write: sizes and alignments follow from it."""
    module = llvm.optimized(str(ir.Module()), "none")
    assert module.data_layout == str(llvm._machine().target_data) != ""
    assert module.triple == binding.get_process_triple()


def variables(code: bytes) -> bytes:
    return llvm.machine_code(TEXT.replace("private constant", "internal global"), "none")


def unknown(code: bytes) -> bytes:
    return code.replace(b"\0cbrt\0", b"\0cbrx\0")


def other_processor(code: bytes) -> bytes:
    return code[:18] + struct.pack("<H", 183) + code[20:]


def other_relocations(code: bytes) -> bytes:
    """R_X86_64_GLOB_DAT in place of R_X86_64_64."""
    found = objects._Object(code)
    (first, *_) = [each for each in found.sections if each.kind == 4 and each.info in found.places]
    return code[: first.offset + 8] + struct.pack("<I", 6) + code[first.offset + 12 :]


def nothing(code: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("change", [variables, unknown, other_processor, other_relocations, nothing])
def test_the_rest_is_left_to_llvm(code: bytes, change: Callable[[bytes], bytes]) -> None:
    assert objects.address_of(change(code), "entry") is None
    assert objects.address_of(code, "exit") is None


def test_no_file_that_is_cut_off_ends_the_process(code: bytes) -> None:
    for size in np.random.default_rng(0).integers(0, len(code), 200):
        objects.address_of(code[:size], "entry")


STEP = """
import sys
import numpy as np
import foreplan as fp

model = fp.models.build("mlp:width=32,batch=8")
session = fp.compile(model, fp.losses.cross_entropy, fp.optim.Adam(1e-3), target="cpu").bind()
from foreplan.runtime.inputs import made_up
session.step(made_up(session.program))
print("llvmlite.binding" in sys.modules, "llvmlite" in open("/proc/self/maps").read())
"""


@pytest.mark.thorough
def test_a_process_that_compiles_nothing_does_without_llvm(tmp_path: Path) -> None:
    """The second of two has all machine code from disk."""
    given = {**os.environ, "FOREPLAN_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", STEP]
    said = [subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert [each.split() for each in said] == [["True", "True"], ["False", "False"]]
