"""Every call that can fail, fails once: files are old or new and whole, sessions go on or say that they cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
CASES = [
    *((name, kind) for name in ("save", "plan", "keep", "share", "bind") for kind in KINDS),
    *((name, kind) for name in ("train", "plans", "ranks", "stages") for kind in KINDS[:5]),
]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*case, marks=[pytest.mark.thorough] * (case not in SOME)) for case in CASES]
)
def test_every_call_that_can_fail_fails_once(name: str, kind: str, shim: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.operations", name, kind, str(tmp_path), str(MOST)]
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == ((name, kind) not in NONE)
