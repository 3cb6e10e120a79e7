"""What tests of several files read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foreplan.base import disk_cache
from foreplan.compiler import kept_plans, shared_plans
from foreplan.planner import driver
from tests.foreplan.sharing import PROBLEM, Machine


@pytest.fixture
def data(tmp_path):
    """40 samples of three classes that a small network can tell apart."""
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, 40)
    x = rng.standard_normal((40, 6)).astype(np.float32) + 4 * np.eye(6, dtype=np.float32)[target]
    np.savez(tmp_path / "data.npz", x=x, target=target)
    return tmp_path / "data.npz"


@pytest.fixture(scope="session")
def compiled_planner() -> None:
    """What the planner runs is compiled, as it is in any process that has the usual cache."""
    driver.plan(PROBLEM, driver.plan(PROBLEM).arena_bytes - 4096)


@pytest.fixture
def machine(compiled_planner: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path)
    monkeypatch.setattr(kept_plans, "in_use", True)
    monkeypatch.setattr(kept_plans, "plan", made.plan)
    monkeypatch.setattr(disk_cache, "_folder", made.private)
    made.next()
    yield made
    made.next()


@pytest.fixture
def folder_of_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shared plans."""
    (tmp_path / "plans").mkdir()
    monkeypatch.setenv(shared_plans.VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"
