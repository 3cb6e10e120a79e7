"""Malformed problems, drawn by Hypothesis: a well-formed one of strategies.py with one thing wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from foreplan.planner import Action, Overwrite, Part, Problem, Region, Role, Value
from tests.planner.strategies import problems


@dataclass(frozen=True)
class Malformed:
    """A problem and what is wrong with it.

    Attributes:
        problem: what is given to the planner.
        names: words of which the error must have at least one: where the fault is.
    """

    problem: Problem
    names: tuple[str, ...]


NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]
STRANGE = (None, 1.5, math.nan, "12", b"x", True, np.int64(3), [1], (1,), {}, object(), 2**70, 10**5000, -(2**70))
ODD: tuple[Any, ...] = (*STRANGE, NESTED)
NO_ROWS: tuple[Any, ...] = (None, 7, "ab", {}, [], [None], (None,), (10**5000,), ([],), NESTED)
Damage = Callable[[st.DrawFn, Problem], Malformed]


def _index(draw: st.DrawFn, items: tuple[Any, ...]) -> int:
    return draw(st.integers(0, len(items) - 1))


def _outside(draw: st.DrawFn, count: int) -> int:
    return draw(st.sampled_from([-1, -2, count, count + 1, 2**40]))


def _with_value(problem: Problem, at: int, **changed: Any) -> Malformed:
    values, name = list(problem.values), problem.values[at].name
    values[at] = replace(values[at], **changed)
    names = (f"value {name!r}", f"value {at}:", "have the same name", repr(name), "the bytes of values")
    return Malformed(replace(problem, values=tuple(values)), names)


def _with_action(problem: Problem, at: int, **changed: Any) -> Malformed:
    actions, name = list(problem.actions), problem.actions[at].name
    actions[at] = replace(actions[at], **changed)
    return Malformed(replace(problem, actions=tuple(actions)), (f"action {name!r}", f"action {at}:"))


def _value_field(draw: st.DrawFn, problem: Problem) -> Malformed:
    field = draw(st.sampled_from(["nbytes", "alignment", "region", "home", "role", "category", "kept", "copy_of"]))
    odd = [each for each in ODD if field != "kept" or not isinstance(each, bool)]
    return _with_value(problem, _index(draw, problem.values), **{field: draw(st.sampled_from(odd))})


def _plain_numbers_for_words(draw: st.DrawFn, problem: Problem) -> Malformed:
    wrong = draw(st.sampled_from([{"role": 0}, {"role": 9}, {"category": "activations"}, {"category": Role.INPUT}]))
    return _with_value(problem, _index(draw, problem.values), **wrong)


def _value_number(draw: st.DrawFn, problem: Problem) -> Malformed:
    wrong: dict[str, Any] = draw(
        st.sampled_from([{"nbytes": -1}, {"nbytes": 2**62}, {"alignment": 0}, {"alignment": 3}, {"alignment": 2**40}])
    )
    return _with_value(problem, _index(draw, problem.values), **wrong)


def _region_that_is_not_there(draw: st.DrawFn, problem: Problem) -> Malformed:
    where = _outside(draw, len(problem.regions))
    if not problem.actions or draw(st.booleans()):
        return _with_value(problem, _index(draw, problem.values), region=where)
    return _with_action(problem, _index(draw, problem.actions), workspace_region=where)


def _no_regions(draw: st.DrawFn, problem: Problem) -> Malformed:
    return Malformed(replace(problem, regions=draw(st.sampled_from([(), [], None, ("arena",)]))), ("region",))


def _a_region_without_sense(draw: st.DrawFn, problem: Problem) -> Malformed:
    wrong: dict[str, Any] = draw(
        st.sampled_from([{"on_device": 1}, {"on_device": None}, {"name": 3}, {"name": None}, {"name": "\ud800"}])
    )
    return Malformed(
        replace(problem, regions=(replace(problem.regions[0], **wrong), *problem.regions[1:])), ("region",)
    )


def _home(draw: st.DrawFn, problem: Problem) -> Malformed:
    at = _index(draw, problem.values)
    return _with_value(problem, at, home=draw(st.sampled_from([at, len(problem.values), -2, 2**40])))


def _name(draw: st.DrawFn, problem: Problem) -> Malformed:
    names: list[Any] = [None, 3, b"x", ("v",), 10**5000, "\ud800"]
    if problem.actions and draw(st.booleans()):
        return _with_action(problem, _index(draw, problem.actions), name=draw(st.sampled_from(names)))
    at = _index(draw, problem.values)
    if len(problem.values) > 1:
        names.append(problem.values[at - 1].name)
    return _with_value(problem, at, name=draw(st.sampled_from(names)))


def _reads_or_writes(draw: st.DrawFn, problem: Problem) -> Malformed:
    at, field = _index(draw, problem.actions), draw(st.sampled_from(["reads", "writes"]))
    usual = getattr(problem.actions[at], field)
    count = len(problem.values)
    wrong: list[Any] = [*NO_ROWS, list(usual), (*usual, -1), (*usual, count), (*usual, None), (*usual, 1.0)]
    wrong += [(*usual, 2**70), (0, 0), (*usual, True)]
    return _with_action(problem, at, **{field: draw(st.sampled_from(wrong))})


def _reads_what_comes_later(draw: st.DrawFn, problem: Problem) -> Malformed:
    """A cycle, or a value that nothing has written yet: the last action's result, read by itself or by one before."""
    written = [v for action in problem.actions for v in action.writes]
    at = min(i for i, action in enumerate(problem.actions) if written[-1] in action.writes)
    at = draw(st.integers(0, at))
    return _with_action(problem, at, reads=(*problem.actions[at].reads, written[-1]))


def _nobody_writes_it(draw: st.DrawFn, problem: Problem) -> Malformed:
    name = f"v{len(problem.values)}"
    lost = Value(name, 64, role=draw(st.sampled_from([Role.OUTPUT, Role.TRANSIENT])))
    grown = replace(problem, values=(*problem.values, lost))
    if lost.role is Role.OUTPUT:
        return Malformed(grown, (repr(name),))
    at = _index(draw, problem.actions)
    made = _with_action(grown, at, reads=(*problem.actions[at].reads, len(problem.values)))
    return Malformed(made.problem, (repr(name),))


def _writes_what_is_given(draw: st.DrawFn, problem: Problem) -> Malformed:
    given = [i for i, value in enumerate(problem.values) if value.role in (Role.INPUT, Role.STORED)]
    at = _index(draw, problem.actions)
    return _with_action(problem, at, writes=(*problem.actions[at].writes, draw(st.sampled_from(given))))


def _action_number(draw: st.DrawFn, problem: Problem) -> Malformed:
    field = draw(st.sampled_from(["workspace", "flops", "nbytes", "nanoseconds", "workspace_region", "effect"]))
    wrong = [odd for odd in ODD if not (field == "effect" and odd is True)]
    wrong += [-1, *([2**62] if field != "effect" else [1])]
    made = _with_action(problem, _index(draw, problem.actions), **{field: draw(st.sampled_from(wrong))})
    return Malformed(made.problem, (*made.names, field))  # a sum that is too large has no place of its own


def _pairs(draw: st.DrawFn, problem: Problem) -> Malformed:
    at, field = _index(draw, problem.actions), draw(st.sampled_from(["overwrites", "parts"]))
    wrong: list[Any] = list(NO_ROWS)
    wrong.remove([])
    for number in (-1, 99, None, 1.0, True, 2**70, "0"):
        wrong += [(Overwrite(number, 0),), (Overwrite(0, number),)] if field == "overwrites" else []
        wrong += [(Part(number, 0, 0),), (Part(0, number, 0),)] if field == "parts" else []
    wrong += [(Overwrite(0, 0, 1),), (Part(0, 0, 0),)] if field == "overwrites" else []  # type: ignore[arg-type]
    wrong += [(Part(0, 0, -1),), (Part(0, 0, None),), (Overwrite(0, 0),)] if field == "parts" else []  # type: ignore[arg-type]
    return _with_action(problem, at, **{field: draw(st.sampled_from(wrong))})


def _rows(draw: st.DrawFn, problem: Problem) -> Malformed:
    field = draw(st.sampled_from(["values", "actions", "regions"]))
    usual = getattr(problem, field)
    wrong = [
        *NO_ROWS,
        list(usual),
        (*usual, None),
        (*usual, Region("r") if field != "regions" else Action("a", (), ())),
    ]
    return Malformed(replace(problem, **{field: draw(st.sampled_from(wrong))}), (field,))


def _too_much_together(draw: st.DrawFn, problem: Problem) -> Malformed:
    field = draw(st.sampled_from(["workspace", "flops", "nbytes", "nanoseconds"]))
    actions = tuple(replace(action, **{field: 2**56 // len(problem.actions) + 1}) for action in problem.actions)
    return Malformed(replace(problem, actions=actions), (field,))


DAMAGES: tuple[Damage, ...] = (
    _value_field,
    _plain_numbers_for_words,
    _value_number,
    _region_that_is_not_there,
    _no_regions,
    _a_region_without_sense,
    _home,
    _name,
    _reads_or_writes,
    _reads_what_comes_later,
    _nobody_writes_it,
    _writes_what_is_given,
    _action_number,
    _pairs,
    _rows,
    _too_much_together,
)


@st.composite
def malformed(draw: st.DrawFn, damage: Damage) -> Malformed:
    """A drawn problem with one drawn fault of a kind."""
    return damage(draw, draw(problems(most=5).filter(lambda problem: len(problem.actions) > 0)))
