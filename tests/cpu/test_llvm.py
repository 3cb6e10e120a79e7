"""Machine code kept on disk: used again, made again where it is damaged, and never missed where it cannot be kept."""

from __future__ import annotations

from pathlib import Path

import llvmlite.ir as ir
import numpy as np
import pytest

from foreplan.base import disk_cache
from foreplan.graph.types import FLOAT32
from foreplan.jit import machine
from foreplan.runtime.cpu.codegen import llvm
from foreplan.runtime.cpu.codegen.loops import operand_kind
from foreplan.runtime.cpu.codegen.maps import Loop, _Elementwise
from tests.cache import kept_files


def doubled() -> list[float]:
    """What a loop gives that is compiled anew, or taken from disk."""
    kind = operand_kind(FLOAT32, 4)
    writer = _Elementwise(Loop(("(a0 * 2.0)",), (kind,), (kind,), 1))
    writer.write()
    x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    table = np.array([3, x.ctypes.data, 4, y.ctypes.data, 4], np.int64).tobytes()
    llvm.compiled(writer.function)(0, 1, table)
    return y.tolist()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled from now on."""
    seen: list[str] = []
    make = machine._machine_code

    def counted(text: str, passes: str) -> bytes:
        seen.append(text)
        return make(text, passes)

    monkeypatch.setattr(machine, "_machine_code", counted)
    return seen


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]) -> None:
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path / "new" / "folder")
    for _ in range(3):
        assert doubled() == [0, 2, 4]
    assert len(compilations) == 1
    (file,) = kept_files(tmp_path / "new" / "folder")
    for damage in (file.read_bytes()[:-1], file.read_bytes()[:-8] + bytes(8), b""):
        file.write_bytes(damage)
        assert doubled() == [0, 2, 4]
    assert len(compilations) == 4


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path / "file" / "folder")
    assert doubled() == doubled() == [0, 2, 4]
    assert len(compilations) == 2


def test_a_function_is_written_where_its_code_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path)
    kind = operand_kind(FLOAT32, 4)
    written: list[str] = []

    def run(factor: str) -> list[float]:
        loop = Loop((f"(a0 * {factor})",), (kind,), (kind,), 1)

        def write() -> ir.Function:
            written.append(factor)
            writer = _Elementwise(loop)
            writer.write()
            return writer.function

        x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
        table = np.array([3, x.ctypes.data, 4, y.ctypes.data, 4], np.int64).tobytes()
        llvm.compiled_as(loop, write)(0, 1, table)
        return y.tolist()

    assert run("2.0") == run("2.0") == [0, 2, 4]
    assert run("3.0") == [0, 3, 6]
    assert written == ["2.0", "3.0"] and len(compilations) == 2
    monkeypatch.setattr(llvm, "sources", lambda package: "changed since")
    assert run("2.0") == [0, 2, 4] and written[2:] == ["2.0"]


def test_code_is_made_anew_when_anything_that_writes_it_has_changed() -> None:
    files = [file for package in ("foreplan.runtime.cpu", "foreplan.ops") for file in disk_cache.source_files(package)]
    found = {"/".join(file.parts[-3:]) for file in files}
    assert {"cpu/codegen/lanes.py", "cpu/kernels/pool.py", "cpu/gemm/tiles.py", "ops/expr/functions.py"} <= found
