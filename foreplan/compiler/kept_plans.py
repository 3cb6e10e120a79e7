"""Plans that took long to find are kept on disk, and shared where `FOREPLAN_PLANS` says; who reads one proves it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from foreplan.base.disk_cache import file_name, keep, kept, sources
from foreplan.base.errors import ForeplanError
from foreplan.base.once import seconds_spent
from foreplan.base.units import parse_budget
from foreplan.compiler import shared_plans
from foreplan.planner import Beside, Plan, Problem, check_problem, plan, verify
from foreplan.planner.answer import check_answer
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.placement.problem import MOST
from foreplan.planner.records import plan_of, plan_records

LEAST = 0.2  # seconds: plans that were found sooner are not kept, unless they are shared
FINDERS = ("foreplan.planner", "foreplan.jit", "foreplan.base.units")  # the source on which a plan depends
SHARED = "shared"  # what a shared plan says of the search, of which nothing can be proved
# What reading something that is no plan, or one of numbers too large, can raise.
_NO_PLAN = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, MemoryError)
in_use = True  # False: every plan is found anew, and none is kept; what measures the planner sets it, and tests do


def kept_plan(problem: Problem, budget: int | float | str | None, remat: str, beside: Beside | None = None) -> Plan:
    """A plan as `foreplan.planner.plan` finds it, from disk or the place of shared plans if it was found before.

    The disk is asked first: it is nearer, and what lies there under a name is the same. A budget that is a share of an
    arena is not shared, since what it comes to in bytes is known to those alone who plan.

    Raises:
        DoesNotFitError, PlanError, UsageError: as `foreplan.planner.plan`.
    """
    if not in_use:
        return plan(problem, budget, remat, beside=beside)
    check_problem(problem)
    asked = None if budget is None else min(parse_budget(budget), MOST)
    question = _Question(problem, asked, remat, beside if isinstance(asked, int) else None)
    shares = shared_plans.in_use() and not isinstance(asked, float)
    name = question.name
    if (found := question.answer(kept(name))) is not None:
        return _without_history(found) if shares else found
    if shares:
        found = _shared(question, name)
        keep(name, question.written(found))
        return found
    started = time.perf_counter() - seconds_spent()
    found = question.plan()
    if time.perf_counter() - seconds_spent() - started >= LEAST:
        keep(name, question.written(found))
    return found


def _shared(question: _Question, name: str) -> Plan:
    """The plan that another process has shared, or has under way; else one that is found and shared now."""
    found = question.answer(shared_plans.shared(name))
    if found is None:
        with shared_plans.turn(name) as later:
            found = question.answer(shared_plans.shared(name)) if later else None
            if found is None:
                found = _without_history(question.plan())
                shared_plans.share(name, question.written(found))
    return _without_history(found)


def _without_history(found: Plan) -> Plan:
    """A plan without what only its finder knows: so all who share it have the same, whoever has found it."""
    about = replace(found.certificate, placement=SHARED, order=SHARED, stages=())
    return replace(found, certificate=about)


@dataclass(frozen=True)
class _Question:
    """What is asked of the planner.

    Attributes:
        asked: the budget in bytes, as a share, or None.
        beside: the bytes that count toward a budget in bytes besides the arena.
    """

    problem: Problem
    asked: int | float | None
    remat: str
    beside: Beside | None

    @property
    def name(self) -> str:
        """Of a file: a digest of the problem, of what is asked for, and of the source of all that finds the plan."""
        about = self.problem.digest, self.asked, self.remat, self.beside is not None, *map(sources, FINDERS)
        return file_name(repr(about), "plan.json")

    def plan(self) -> Plan:
        """The answer, found now."""
        return plan(self.problem, self.asked, self.remat, beside=self.beside)

    def written(self, found: Plan) -> bytes:
        """A plan as text, and the bytes that count beside its arena. It names nothing of the problem or the machine."""
        records = plan_records(found) | {"counted": self._counted(found)}
        return json.dumps(records, separators=(",", ":")).encode()

    def answer(self, content: bytes | None) -> Plan | None:
        """The plan that some content holds, whoever wrote it, if it is proved to be a right one, and within what was
        asked for. What is written is nothing but that. What counts beside the arena must be as it was when the plan was
        chosen for it.
        """
        if content is None:
            return None
        with suppress(ForeplanError, *_NO_PLAN):
            found = plan_of(json.loads(content))
            verify(found, self.problem)
            check_answer(found, self.problem, self.asked, self.remat, self.beside)
            if self.written(found) == content:
                return replace(found, order_lower_bound_bytes=order_bound(self.problem))
        return None

    def _counted(self, found: Plan) -> int:
        return 0 if self.beside is None else self.beside(found)
