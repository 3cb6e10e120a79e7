"""Every call that can fail, fails once: files are old or new and whole, sessions go on or say that they cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MOST = 60  # faults of a kind
# Where there is no such call: a program that says so here has changed, and is looked at anew.
NONE = {
    *((name, "mmap") for name in ("save", "plan", "keep", "share")),
    ("bind", "write error"),
    ("plans", "fsync"),
    *(("bind", kind) for kind in ("write", "fsync", "rename")),
    ("keep", "fsync"),
    ("share", "fsync"),
}
KINDS = ("open", "write", "write error", "fsync", "rename", "mmap", "allocate")
# Training begins with compiling, which allocates more often than can be tried; `bind` and `save` ask for memory alone.
CASES = dict.fromkeys(("save", "plan", "keep", "share", "bind"), KINDS)
CASES |= dict.fromkeys(("train", "plans", "ranks", "stages"), KINDS[:5])


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler that is called cc: install gcc")
    made = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, HERE / "shim.c", "-ldl"], check=True)
    return made


# Two kinds of each operation, so that each kind is there; all of them in the largest profile.
SOME = {("save", "open"), ("save", "rename"), ("plan", "write"), ("plan", "mmap"), ("keep", "allocate")}
SOME |= {
    ("keep", "fsync"),
    ("share", "rename"),
    ("bind", "allocate"),
    ("bind", "open"),
    ("train", "write"),
    ("train", "rename"),
}


def rows() -> Iterator[pytest.ParameterSet]:
    """Of each operation the kinds that a process tries by default, and those that another tries."""
    for name, kinds in CASES.items():
        for usual in (True, False):
            if own := [kind for kind in kinds if ((name, kind) in SOME) == usual]:
                label = f"{name}-{','.join(own) if usual else 'others'}"
                yield pytest.param(name, own, id=label, marks=[pytest.mark.thorough] * (not usual))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kinds"), list(rows()))
def test_every_call_that_can_fail_fails_once(name: str, kinds: list[str], shim: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.operations", name, ",".join(kinds), str(tmp_path), str(MOST)]
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = dict(zip(kinds, map(int, done.stdout.split()), strict=True))
    assert {kind for kind in kinds if not counts[kind]} == {kind for kind in kinds if (name, kind) in NONE}, counts
