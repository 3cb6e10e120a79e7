"""A plan as records, such as a file has, and the plan that records say: types are checked, nothing is proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from foreplan.planner.plan import Certificate, Plan, Step

Record = TypeVar("Record")


def plan_records(plan: Plan) -> dict[str, Any]:
    """A plan as records of a file, which `plan_of` reads."""
    return {
        "plan": {
            "problem": plan.problem_digest,
            "budget": plan.budget,
            "arena_bytes": plan.arena_bytes,
            "lower_bound_bytes": plan.lower_bound_bytes,
            "heights": list(plan.heights),
            "certificate": dataclasses.asdict(plan.certificate),
        },
        "starts": [list(pair) for pair in plan.starts],
        "steps": [[step.action, list(step.reads), list(step.writes), step.workspace] for step in plan.steps],
        "ends": [list(pair) for pair in plan.ends],
    }


def plan_of(data: Mapping[str, Any]) -> Plan:
    """The plan that `plan_records` wrote; nothing of it is proved yet. What `order_bound` says is no part of it.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the records are none of a plan.
    """
    about = data["plan"]
    certificate, budget = about["certificate"], about["budget"]
    return Plan(
        problem_digest=string(about["problem"]),
        steps=each(
            data["steps"], lambda s: Step(integer(s[0]), each(s[1], integer), each(s[2], integer), integer(s[3]))
        ),
        starts=each(data["starts"], lambda pair: (integer(pair[0]), integer(pair[1]))),
        ends=each(data["ends"], lambda pair: (integer(pair[0]), integer(pair[1]))),
        heights=each(about["heights"], integer),
        arena_bytes=integer(about["arena_bytes"]),
        lower_bound_bytes=integer(about["lower_bound_bytes"]),
        order_lower_bound_bytes=None,
        certificate=Certificate(
            integer(certificate["peak_step"]),
            string(certificate["placement"]),
            string(certificate["order"]),
            each(certificate["stages"], lambda stage: (string(stage[0]), integer(stage[1]))),
        ),
        budget=None if budget is None else integer(budget),
    )


def each(records: Any, read: Callable[[Any], Record]) -> tuple[Record, ...]:
    """What each record of a list says.

    Raises:
        ValueError: there is no list.
    """
    if not isinstance(records, list):
        raise ValueError("a list was expected")
    return tuple(read(record) for record in records)


def integer(value: Any) -> int:
    """A whole number; no bool, and none that a sum could take beyond 64 bits.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or abs(value) >= 1 << 62:
        raise ValueError(f"{value!r} is not a whole number in range")
    return value


def string(value: Any) -> str:
    """A text.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value
