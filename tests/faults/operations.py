"""One operation, with the n-th call of a kind failing, for every n until it gets through: `operations.py NAME KINDS`.

Runs in a process into which the shim was loaded. Prints for each kind how many faults there were; an assertion tells
what one broke.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

import foreplan as fp
from foreplan.base import disk_cache
from foreplan.cli import cli
from foreplan.compiler import shared_plans
from foreplan.compiler.kept_plans import kept_plan
from foreplan.runtime.session import Session
from tests.cache import kept_files
from tests.faults.of_ranks import RanksSave, in_parts, in_stages
from tests.remembered import forget

KINDS = {
    "open": (1, errno.EMFILE),
    "write": (2, errno.ENOSPC),
    "fsync": (3, errno.EIO),
    "write error": (2, errno.EIO),
    "rename": (4, errno.EIO),
    "mmap": (5, errno.ENOMEM),
    "allocate": (6, errno.ENOMEM),
}
MODEL = "mlp:batch=4,width=64,layers=2,inputs=6,classes=3"
SHIM = ctypes.CDLL(None)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((4, 6), np.float32), "target": rng.integers(0, 3, 4)}


class Operation:
    """What is tried, and what must hold after it whatever happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = fp.compile(fp.models.build(MODEL), fp.losses.cross_entropy, fp.optim.Nesterov(0.1))
        self.session = self.step.bind()
        self.session.step(batch())

    def run(self) -> None:
        raise NotImplementedError

    def attempt(self, arm: Callable[[], object], disarm: Callable[[], int]) -> bool:
        """Run while a call fails; whether one did."""
        arm()
        try:
            self.run()
        finally:
            self.happened = bool(disarm())
        return self.happened

    def check(self, done: bool) -> None:
        raise NotImplementedError

    def usable(self, session: Session) -> None:
        """It runs a step, or says that it cannot."""
        try:
            assert np.isfinite(session.step(batch()).loss)
        except fp.SessionError as error:
            assert "interrupted" in str(error)
            session.load(self.folder.parent / "good")
            assert np.isfinite(session.step(batch()).loss)


class Save(Operation):
    """A checkpoint takes the place of an older one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "file"
        self.write()
        self.old = self.path.read_bytes()
        self.session.step(batch())
        self.session.save(folder.parent / "good")

    def write(self) -> None:
        self.session.save(self.path)

    run = write

    def check(self, done: bool) -> None:
        found = self.path.read_bytes()
        assert os.listdir(self.folder) == ["file"], os.listdir(self.folder)
        if found != self.old:
            self.write()
            assert self.path.read_bytes() == found, "neither the old file nor the new one"
        else:
            assert not done or self.same, "it says that it is done"
        self.path.write_bytes(self.old)
        self.read()

    same = False  # whether the old file and the new one are alike

    def read(self) -> None:
        other = self.step.bind()
        other.load(self.path)
        self.usable(other)


class Plan(Save):
    """A plan file takes the place of an older one."""

    same = True

    def write(self) -> None:
        self.step.save(self.path)

    run = write

    def read(self) -> None:
        fp.load_plan(self.path)


class Keep(Operation):
    """Something is kept in the cache, and read: it never fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.new = folder, b"new" * 10_000
        os.environ[disk_cache.VARIABLE] = str(folder / "kept")
        disk_cache.keep("a", b"old")

    def run(self) -> None:
        disk_cache.keep("a", self.new)
        disk_cache.kept("a")

    def check(self, done: bool) -> None:
        assert done, "nothing may depend on what is kept"
        assert [file.name for file in kept_files(self.folder / "kept")] == ["a"]
        assert disk_cache.kept("a") in (b"old", self.new)
        disk_cache.keep("a", b"old")


class Share(Operation):
    """A plan is shared, and read: it never fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.new = folder / "plans", b"new" * 10_000
        self.folder.mkdir()
        os.environ[shared_plans.VARIABLE] = str(self.folder)
        shared_plans.share("a", b"old")

    def run(self) -> None:
        shared_plans.share("a", self.new)
        shared_plans.shared("a")

    def check(self, done: bool) -> None:
        assert done, "nothing may depend on what is shared"
        assert os.listdir(self.folder) == ["a"]
        assert shared_plans.shared("a") in (b"old", self.new)
        shared_plans.share("a", b"old")


class Plans(Operation):
    """A plan is found, kept and shared by one process, and read by the next: it never fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "plans").mkdir()
        os.environ[disk_cache.VARIABLE] = str(folder / "kept")
        os.environ[shared_plans.VARIABLE] = str(folder / "plans")
        self.program = fp.lower(fp.models.build(MODEL), "numpy")
        self.right = kept_plan(self.program, None, "auto")

    def run(self) -> None:
        for _ in range(2):
            shared_plans._place.cache_clear()
            assert kept_plan(self.program, None, "auto") == self.right

    def check(self, done: bool) -> None:
        assert done, "nothing may depend on what is kept or shared"
        for files in (kept_files(self.folder / "kept"), list((self.folder / "plans").iterdir())):
            plans = [file for file in files if file.suffix != ".o"]  # beside compiled loops of the planner
            assert [file.suffixes for file in plans] in ([], [[".plan", ".json"]]), files
            for file in plans:
                file.unlink()


class Bind(Operation):
    """A session is made, takes a step and reads a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.session.save(folder.parent / "good")
        self.made: Session | None = None

    def run(self) -> None:
        self.made = None
        self.made = self.step.bind()
        self.made.step(batch())
        self.made.load(self.folder.parent / "good")

    def check(self, done: bool) -> None:
        assert not os.listdir(self.folder)
        self.usable(self.session)
        if self.made is not None:
            self.usable(self.made)


class Train(Operation):
    """The command, saving after every second step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        rng = np.random.default_rng(0)
        data = folder.parent / "data.npz"
        np.savez(data, x=rng.standard_normal((16, 6), np.float32), target=rng.integers(0, 3, 16))
        self.path = folder / "w.safetensors"
        self.arguments = ["train", MODEL, "--data", str(data), "--save-every", "2", "-o", str(self.path)]
        self.run()

    def run(self) -> None:
        done = CliRunner().invoke(cli, self.arguments)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            assert "Traceback" not in done.stderr and "error: " in done.stderr, done.stderr
            raise fp.SessionError(done.stderr)

    def check(self, done: bool) -> None:
        assert os.listdir(self.folder) == ["w.safetensors"], os.listdir(self.folder)
        session = self.step.bind()
        session.load(self.path)
        assert session.steps_done in (2, 4)


OPERATIONS: dict[str, Callable[[Path], Any]] = {
    "save": Save,
    "plan": Plan,
    "keep": Keep,
    "share": Share,
    "bind": Bind,
    "train": Train,
    "plans": Plans,
    "ranks": lambda folder: RanksSave(folder, in_parts()),
    "stages": lambda folder: RanksSave(folder, in_stages()),
}


def main(name: str, kind: str, folder: Path, most: int) -> int:
    """How many calls were made to fail, one a time."""
    operation = OPERATIONS[name](folder)
    operation.run()
    operation.check(True)
    which, error = KINDS[kind]
    for number in range(1, most + 1):
        done = True
        try:
            operation.attempt(partial(SHIM.fault_arm, which, number, error), SHIM.fault_disarm)
        except (fp.ForeplanError, MemoryError):
            done = False
        operation.check(done)
        if not operation.happened:
            return number - 1
    return most


if __name__ == "__main__":
    for kind in sys.argv[2].split(","):
        folder = Path(sys.argv[3]) / kind / "folder"
        folder.mkdir(parents=True)
        forget()
        print(main(sys.argv[1], kind, folder, int(sys.argv[4])), flush=True)
