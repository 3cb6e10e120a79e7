"""The rank that writes a checkpoint finds the disk full, or failing, in any of its calls: all ranks are told, the file
is the one before or the new one, whole, and all can go on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import foreplan as fp
from foreplan.base import files
from tests.ranks.differences import batch_for, stages_of, step_of
from tests.ranks.threads import Thread, run

KINDS: dict[str, Callable[[], Any]] = {
    "all alike": lambda: [step_of(2)] * 2,
    "state in parts": lambda: [step_of(2, shard="state")] * 2,
    "parameters in parts": lambda: [step_of(2, shard="parameters")] * 2,
    "stages": lambda: stages_of(2),
}


class FailingOs:
    """The module os, one call of which fails: the n-th that opens, writes, syncs or renames."""

    def __init__(self) -> None:
        self.fails, self.number, self.count = 0, errno.ENOSPC, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return self.failing(found) if name in ("open", "fsync", "rename") else found

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, which may be the one."""

        def wrapped(*words: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.fails:
                raise OSError(self.number, os.strerror(self.number))
            return call(*words, **named)

        return wrapped

    def fdopen(self, descriptor: int, mode: str) -> BinaryIO:
        """A file whose writes count, too."""
        file: Any = os.fdopen(descriptor, mode, buffering=0)
        return _Counted(file, self)  # type: ignore[return-value]


class _Counted:
    """A file whose writes may fail."""

    def __init__(self, file: BinaryIO, calls: FailingOs) -> None:
        self.file, self.write = file, calls.failing(file.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_each_call_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    steps, path, calls = KINDS[kind](), tmp_path / "w.safetensors", FailingOs()
    calls.number = number
    monkeypatch.setattr(files, "os", calls)

    def job(world: Thread) -> list[str]:
        session, told = steps[world.rank].bind(), list[str]()
        batch = batch_for(steps[world.rank], micro_batches=steps[world.rank].accumulate)
        session.step(batch)
        session.save(path)
        before = path.read_bytes()
        session.step(batch)
        while True:
            world.gather(None)
            if world.rank == 0:
                calls.fails, calls.count = len(told) + 1, 0
            world.gather(None)
            try:
                session.save(path)
            except fp.SessionError as error:
                told.append(str(error))
                assert list(tmp_path.iterdir()) == [path]
                assert path.read_bytes() == before or "is written" in str(error)
                world.gather(None)
                continue
            assert path.read_bytes() != before
            session.step(batch)
            return told

    found = run(2, job)
    assert len(found[0]) >= 6 and [f"rank 0 failed: {text}" for text in found[0]] == found[1]
    assert all(os.strerror(number) in text for text in found[0])
