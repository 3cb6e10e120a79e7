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
from foreplan.planner import Certificate, Plan, Problem, Step, check_problem, plan, verify
from foreplan.units import parse_budget

LEAST = 0.2  # seconds: plans that were found sooner are not kept


def kept_plan(problem: Problem, budget: int | float | str | None, remat: str) -> Plan:
    """A plan as `foreplan.planner.plan` finds it, from disk if it was found before.

    Its name on disk is a digest of the problem, of what is asked for, and of the planner's source.

    Raises:
        DoesNotFitError, PlanError, UsageError: as `foreplan.planner.plan`.
    """
    check_problem(problem)
    asked = None if budget is None else parse_budget(budget)
    about = repr((problem.digest, asked, remat, sources("foreplan.planner")))
    name = f"{hashlib.sha256(about.encode()).hexdigest()}.plan.json"
    if (content := kept(name)) is not None:
        with suppress(ForeplanError, ValueError, TypeError, KeyError):
            found = _read(content)
            verify(found, problem)
            return found
    started = time.perf_counter() - seconds_spent()
    found = plan(problem, budget, remat)
    if time.perf_counter() - seconds_spent() - started >= LEAST:
        keep(name, _written(found))
    return found


def _written(plan: Plan) -> bytes:
    steps = [(step.action, step.reads, step.writes, step.workspace) for step in plan.steps]
    others = asdict(replace(plan, steps=()))
    return json.dumps(others | {"steps": steps}, separators=(",", ":")).encode()


def _read(content: bytes) -> Plan:
    fields = json.loads(content)
    steps = [
        Step(action, tuple(reads), tuple(writes), workspace) for action, reads, writes, workspace in fields["steps"]
    ]
    certificate = fields["certificate"]
    stages = tuple((name, nbytes) for name, nbytes in certificate["stages"])
    pairs = {name: tuple((value, offset) for value, offset in fields[name]) for name in ("starts", "ends")}
    read = {"steps": tuple(steps), "heights": tuple(fields["heights"])}
    return Plan(**fields | pairs | read | {"certificate": Certificate(**certificate | {"stages": stages})})
