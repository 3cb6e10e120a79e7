"""The runner tells how each case ended, whatever it does to its process."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from foreplan.base.errors import UsageError
from tests.fuzz import runner
from tests.fuzz.target import Target


def _misbehave(content: bytes, folder: Path) -> None:
    assert not list(folder.iterdir())
    (folder / "left").write_bytes(content)
    what = content.decode()
    if what == "refused":
        raise UsageError("no")
    if what == "raw error":
        UsageError("never raised").args[7]
    if what == "late":
        time.sleep(60)
    while what == "hang":
        pass
    if what == "blow-up":
        np.ones(1 << 26, np.uint8)
    if what == "endless":
        np.ones(1 << 40, np.uint8)
    if what == "crash":
        os.kill(os.getpid(), 11)


def _target(*whats: str) -> Target:
    return Target("misbehaving", lambda rng: rng.choice(whats).encode(), _misbehave)


@pytest.mark.parametrize(
    "what, kind",
    [
        ("fine", "fine"),
        ("refused", "refused"),
        ("raw error", "raw error"),
        ("hang", "hang"),
        ("late", "hang"),
        ("blow-up", "blow-up"),
        ("endless", "blow-up"),
        ("crash", "crash"),
    ],
)
def test_how_a_case_ends_is_told(what: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SECONDS", 0.3 if what == "hang" else 10)
    monkeypatch.setattr(runner, "WAIT", 1 if what == "late" else 60)
    monkeypatch.setattr(runner, "GROWTH", 1 << 25)
    tally = runner.fuzz(_target(what), seed=0, cases=3 if kind in ("fine", "refused") else 1, seconds=None, jobs=1)
    assert set(tally.counts) == {kind}
    assert [content for content, _ in tally.failures.values()] == [what.encode()] * (kind in runner.DEFECTS)


def test_one_defect_is_kept_once_and_the_cases_after_it_run(tmp_path: Path) -> None:
    tally = runner.fuzz(_target("fine", "refused", "crash", "raw error"), seed=1, cases=20, seconds=None, jobs=2)
    assert tally.counts.total() == 20
    assert set(tally.counts) == {"fine", "refused", "crash", "raw error"}
    tally.write(tmp_path)
    assert sorted(file.suffix for file in (tmp_path / "misbehaving").iterdir()) == [".case", ".case", ".txt", ".txt"]


def test_a_seed_and_a_number_name_a_case() -> None:
    drawn = [runner._content(Target("t", lambda rng: rng.randbytes(8), _misbehave), 5, number) for number in (0, 1, 0)]
    assert drawn[0] == drawn[2] == random.Random("5/t/0").randbytes(8) != drawn[1]


def test_time_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a hundredth of a second whenever it is read: the machine may be busy."""
    clock = itertools.count()
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock) / 100))
    tally = runner.fuzz(_target("fine"), seed=0, cases=None, seconds=0.5, jobs=2)
    assert 1 < tally.counts.total() < 50 and tally.seconds > 0.5
