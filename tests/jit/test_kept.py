"""Machine code is kept on disk: used again, made again where it is damaged or its source has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foreplan.base import disk_cache
from foreplan.jit import compiled, machine
from tests.cache import kept_files

SOURCE = """
import sys
import numpy as np
from foreplan.jit import compiled, machine

FACTOR = 3

@compiled
def inner(x):
    return x * FACTOR

made = []
machine._machine_code = lambda *args, make=machine._machine_code: made.append(args) or make(*args)

@compiled(fastmath={"contract", "nsz"})
def outer(x):
    total = 0.0
    for i in range(len(x)):
        total += inner(x[i])
    return total

print(outer(np.arange(4.0)), len(made))
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    file = tmp_path / "outer.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def start(module: Path, folder: Path, **environment: str) -> subprocess.Popen[str]:
    given = {**os.environ, "FOREPLAN_CACHE_DIR": str(folder), **environment}
    # Without bytecode: Python takes that of a module for its own if size and second of the source are the same.
    command = [sys.executable, "-B", "-c", "import outer"]
    return subprocess.Popen(
        command, cwd=module.parent, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(module: Path, folder: Path, **environment: str) -> tuple[float, int, str]:
    """What the function gives in a new process, how often it was compiled there, and what was said."""
    process = start(module, folder, **environment)
    out, err = process.communicate()
    assert process.returncode == 0, err
    result, compilations = out.split()
    return float(result), int(compilations), err


def test_it_is_compiled_once(module: Path, folder: Path) -> None:
    assert run(module, folder) == (18, 1, "")
    assert run(module, folder) == (18, 0, "")
    assert len(kept_files(folder)) == 1


def test_a_damaged_file_is_made_anew(module: Path, folder: Path) -> None:
    run(module, folder)
    (file,) = kept_files(folder)
    whole = file.read_bytes()
    middle = len(whole) // 2
    for damaged in (
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        whole[:-1],
    ):
        file.write_bytes(damaged)
        assert run(module, folder) == (18, 1, "")
        assert run(module, folder) == (18, 0, "")


@pytest.mark.parametrize(
    "before, after, result, compilations",
    [
        ("return x * FACTOR", "return x * FACTOR + 1", 22, 1),  # of what it calls
        ("FACTOR = 3", "FACTOR = 4", 24, 1),
        ("total = 0.0", "total = 5.0", 23, 1),
        ("def outer(x):\n", "def outer(x):\n    # as before\n\n", 18, 0),
        ('"contract", "nsz"', '"contract"', 18, 1),
    ],
)
def test_it_is_compiled_anew_when_its_source_has_changed(
    module: Path, folder: Path, before: str, after: str, result: float, compilations: int
) -> None:
    run(module, folder)
    module.write_text(SOURCE.replace(before, after))
    assert run(module, folder) == (result, compilations, "")


def test_processes_that_start_together_compile_once(module: Path, folder: Path) -> None:
    processes = [start(module, folder) for _ in range(4)]
    said = [process.communicate() for process in processes]
    assert sorted(said) == [("18.0 0\n", "")] * 3 + [("18.0 1\n", "")]
    assert len(kept_files(folder)) == 1
    assert run(module, folder) == (18, 0, "")


NOWHERE: Mapping[str, str] = {"FOREPLAN_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/proc/nobody"}


@pytest.mark.parametrize("environment", [NOWHERE, {**NOWHERE, "HOME": "nobody"}, {"FOREPLAN_CACHE_DIR": "/proc/none"}])
def test_without_a_place_it_runs_and_says_so_once(module: Path, folder: Path, environment: Mapping[str, str]) -> None:
    module.write_text(f"{SOURCE}\nouter(np.arange(3))\n")  # compiled twice
    result, compilations, said = run(module, folder, **environment)
    assert (result, compilations) == (18, 1)
    assert said.count("\n") == said.count("note: compiled code cannot be kept") == 1
    assert "FOREPLAN_CACHE_DIR" in said
    assert {file.name for file in module.parent.iterdir()} <= {"outer.py", "__pycache__"}


def test_what_others_may_write_is_not_used(module: Path, folder: Path) -> None:
    run(module, folder)
    (file,) = kept_files(folder)
    for path, mode in ((folder, 0o777), (folder, 0o775), (file.parent, 0o777), (file, 0o646)):
        before = path.stat().st_mode
        path.chmod(mode)
        result, compilations, said = run(module, folder)
        assert (result, compilations) == (18, 1)
        assert ("others may write there" in said) == (path != file)
        path.chmod(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(module: Path, folder: Path) -> None:
    run(module, folder)
    os.chown(folder, 12345, 12345)
    result, compilations, said = run(module, folder)
    assert (result, compilations) == (18, 1) and "others may write there" in said


@pytest.mark.parametrize("store", [True, False], ids=["kept", "not kept"])
def test_threads_that_need_the_same_function_at_once_compile_it_once(
    store: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the planner's do, of which each works on another candidate."""
    monkeypatch.setattr(disk_cache, "_folder", lambda: folder if store else None)
    made: list[object] = []
    both = threading.Barrier(2)
    make = machine._machine_code
    monkeypatch.setattr(machine, "_machine_code", lambda *given: made.append(given) or make(*given))

    @compiled
    def tripled(x: int) -> int:
        return 3 * x

    def call(x: int) -> int:
        both.wait()
        return tripled(x)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(call, (1, 2))) == [3, 6]
    assert len(made) == 1


ELSEWHERE = """
import os
import platform
from foreplan.base import processor

if os.environ["ON"]:
    processor.instructions = lambda: tuple(os.environ["ON"].split("; "))
    platform.machine = lambda machine=platform.machine: os.environ["MACHINE"] or machine()
"""
INTEL = "GenuineIntel; 6; 143; 8; fpu avx2 avx512f amx_tile"  # as the system tells of a processor
LESS = INTEL.replace(" amx_tile", "")
PROCESSORS = [("", ""), (INTEL, ""), (LESS, ""), (INTEL, "aarch64")]


def test_processors_that_share_a_home_keep_their_code_apart(module: Path, folder: Path) -> None:
    """None runs another's, and none removes it: each compiles once."""
    module.write_text(ELSEWHERE + SOURCE)
    for made, here in ((1, PROCESSORS), (0, PROCESSORS[:2])):
        processes = [start(module, folder, ON=on, MACHINE=machine) for on, machine in here]
        said = [process.communicate() for process in processes]
        assert said == [(f"18.0 {made}\n", "")] * len(here)
        assert len(kept_files(folder)) == len(PROCESSORS)
