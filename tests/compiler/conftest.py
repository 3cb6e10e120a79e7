"""What tests of several files read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foreplan.base import disk_cache
from foreplan.compiler import kept_plans, shared_plans
from foreplan.planner import driver
from tests.compiler.sharing import PROBLEM, Machine


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
