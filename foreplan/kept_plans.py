"""Plans that took long to find are kept on disk, and verified again when they are read."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, replace

from foreplan.disk_cache import keep, kept, sources
from foreplan.errors import ForeplanError
from foreplan.once import seconds_spent
from foreplan.planner import Beside, Certificate, Plan, Problem, Step, check_problem, plan, verify
from foreplan.units import parse_budget

LEAST = 0.2  # seconds: plans that were found sooner are not kept
in_use = True  # False: every plan is found anew, and none is kept; what measures the planner sets it, and tests do


def kept_plan(problem: Problem, budget: int | float | str | None, remat: str, beside: Beside | None = None) -> Plan:
    """A plan as `foreplan.planner.plan` finds it, from disk if it was found before.

    Its name on disk is a digest of the problem, of what is asked for, and of the planner's source. What counts beside
    the arena must be as it was then.

    Raises:
        DoesNotFitError, PlanError, UsageError: as `foreplan.planner.plan`.
    """
    if not in_use:
        return plan(problem, budget, remat, beside=beside)
    check_problem(problem)
    asked = None if budget is None else parse_budget(budget)
    about = repr((problem.digest, asked, remat, beside is not None, sources("foreplan.planner")))
    name = f"{hashlib.sha256(about.encode()).hexdigest()}.plan.json"
    if (content := kept(name)) is not None:
        with suppress(ForeplanError, ValueError, TypeError, KeyError):
            found, counted = _read(content)
            verify(found, problem)
            if beside is None or beside(found) == counted:
                return found
    started = time.perf_counter() - seconds_spent()
    found = plan(problem, budget, remat, beside=beside)
    if time.perf_counter() - seconds_spent() - started >= LEAST:
        keep(name, _written(found, 0 if beside is None else beside(found)))
    return found


def _written(plan: Plan, counted: int) -> bytes:
    """A plan, and the bytes that counted beside its arena."""
    steps = [(step.action, step.reads, step.writes, step.workspace) for step in plan.steps]
    others = asdict(replace(plan, steps=()))
    return json.dumps(others | {"steps": steps, "counted": counted}, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Plan, int]:
    fields = json.loads(content)
    counted = int(fields["counted"])
    steps = [
        Step(action, tuple(reads), tuple(writes), workspace) for action, reads, writes, workspace in fields["steps"]
    ]
    certificate = fields["certificate"]
    stages = tuple((name, nbytes) for name, nbytes in certificate["stages"])
    pairs = {name: tuple((value, offset) for value, offset in fields[name]) for name in ("starts", "ends")}
    read = {"steps": tuple(steps), "heights": tuple(fields["heights"])}
    own = {name: content for name, content in fields.items() if name != "counted"}
    whole = own | pairs | read | {"certificate": Certificate(**certificate | {"stages": stages})}
    return Plan(**whole), counted
