"""What tests of shared plans have in common: processes of one machine after the other, and what is no plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foreplan.base.disk_cache import sealed
from foreplan.compiler import shared_plans
from foreplan.compiler.kept_plans import kept_plan
from foreplan.planner import Plan, Problem, driver
from tests.cache import kept_files
from tests.planner.problems import training_net

PROBLEM = training_net(4)
HOSTILE = {
    "nothing": b"",
    "a digest": bytes(32),
    "no digest": b"{}",
    "no JSON": sealed(b"nonsense"),
    "an empty object": sealed(b"{}"),
    "a list": sealed(b"[]"),
    "null": sealed(b"null"),
    "too deep": sealed(b"[" * 1_000_000),
    "too many digits": sealed(b"1" * 100_000),
    "no number": sealed(b"NaN"),
    "no UTF-8": sealed(b'"\xff"'),
    "too large": sealed(b" " * shared_plans.LARGEST),
    "many lists": sealed(b'{"plan":[' + b"[]," * 1_000_000 + b"[]]}"),
}


class Machine:
    """Where this process seems to run: with a private cache of its own, and a note of what it plans."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.planned = folder, 0, 0

    def private(self) -> Path:
        return self.folder / f"private{self.number}"

    def next(self) -> None:
        """Go on as a process of another machine."""
        self.number += 1
        shared_plans._place.cache_clear()
        shared_plans._told = False

    def plan(self, *question: Any, **options: Any) -> Plan:
        self.planned += 1
        return driver.plan(*question, **options)

    def found(self, problem: Problem = PROBLEM, budget: Any = None, remat: str = "auto", beside: Any = None) -> Plan:
        """A plan as another machine finds it."""
        self.next()
        return kept_plan(problem, budget, remat, beside)


def only(folder: Path) -> Path:
    """The one file of shared plans, or of a private cache."""
    (file,) = kept_files(folder)
    return file
