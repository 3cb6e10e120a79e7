"""What follows from a problem by itself: producers, readers, round trips off the device, and its text."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from foreplan.planner import Action, Category, Overwrite, Part, Problem, Region, Role, Value
from tests.planner.problems import REGIONS, Maker, random_problem
from tests.planner.test_wellformed import GOOD


@pytest.mark.parametrize("seed", range(20))
def test_producers_and_readers_are_who_writes_and_reads(seed: int) -> None:
    problem = random_problem(seed)
    for v in range(len(problem.values)):
        assert problem.producers[v] == tuple(i for i, a in enumerate(problem.actions) if v in a.writes)
        assert problem.readers[v] == tuple(i for i, a in enumerate(problem.actions) if v in a.reads)
    assert problem.sizes.tolist() == [value.nbytes for value in problem.values]


def trip(**changed: Any) -> Problem:
    """x → a, which is copied off the device and back; f and g need it."""
    make = Maker(REGIONS)
    x, a = make.value("x", 64, role=Role.INPUT), make.value("a", 64, **changed.get("a", {}))
    away = make.value("away", 64, **{"region": 2, **changed.get("away", {})})
    y, z = make.value("y", 64, role=Role.OUTPUT), make.value("z", 64, role=Role.OUTPUT)
    make.action("a", [x], [a])
    make.action("f", [a], [y])
    make.action("save", [a, *changed.get("saved_with", [])], [away], **changed.get("save", {}))
    make.action("fetch", [away], [a], **changed.get("fetch", {}))
    make.action("g", [a, y, *changed.get("read", [])], [z])
    if changed.get("twice"):
        make.action("save again", [a], [away])
    return make.problem()


def test_a_copy_off_the_device_and_back_is_a_round_trip() -> None:
    assert trip().round_trips == {1: (2, 3)}
    assert trip().copies == {2, 3}


@pytest.mark.parametrize(
    "changed",
    [
        {"save": {"effect": True}},
        {"fetch": {"effect": True}},
        {"a": {"role": Role.OUTPUT}},
        {"away": {"role": Role.OUTPUT}},
        {"away": {"region": 0}},  # on the device
        {"a": {"region": 2}},  # off it already
        {"saved_with": [0]},  # made of something else as well
        {"read": [2]},  # by another action, in host memory
        {"twice": True},  # either way
    ],
)
def test_what_is_no_round_trip(changed: dict[str, Any]) -> None:
    assert trip(**changed).round_trips == {}
    assert trip(**changed).copies == frozenset()


def test_a_value_that_is_given_is_no_copy_of_what_is_made_of_it() -> None:
    make = Maker(REGIONS)
    x, y = make.value("x", 64, 2, role=Role.INPUT), make.value("y", 64)
    make.action("f", [x], [y])
    make.action("end", [y], [make.value("z", 64, role=Role.OUTPUT)])
    assert make.problem().round_trips == {}


OTHER: dict[type, Any] = {int: lambda n: n + 1, bool: lambda b: not b, str: lambda s: s + "'"}
OTHER[tuple] = lambda items: (*items[:-1], 99) if type(items[0]) is int else ()
OTHER |= {Role: lambda role: Role((role + 1) % 4), Category: lambda c: next(x for x in Category if x is not c)}


def variants(item: Any) -> list[Any]:
    """Everything that differs from a record in one field."""
    found = [(f.name, getattr(item, f.name)) for f in fields(item)]
    return [replace(item, **{name: OTHER[type(old)](old)}) for name, old in found if old != ()]


def test_the_digest_sees_every_field_of_everything() -> None:
    """Two problems have the same digest only where the planner could not tell them apart."""
    away = Value("away", 64, region=1)
    problem = replace(GOOD, values=(*GOOD.values, away), regions=(*GOOD.regions, Region("host", on_device=False)))
    assert Problem(problem.values, problem.actions, problem.regions).digest == problem.digest
    changed = [replace(problem, regions=(other, problem.regions[1])) for other in variants(problem.regions[0])]
    for i, value in enumerate(problem.values):
        for other in variants(value):
            changed.append(replace(problem, values=(*problem.values[:i], other, *problem.values[i + 1 :])))
    for i, action in enumerate(problem.actions):
        others = variants(action)
        for name in ("overwrites", "parts"):
            pairs: tuple[Overwrite | Part, ...] = getattr(action, name)
            others += [replace(action, **{name: (other, *pairs[1:])}) for pair in pairs[:1] for other in _moved(pair)]
        for new in others:
            if isinstance(new, Action):
                changed.append(replace(problem, actions=(*problem.actions[:i], new, *problem.actions[i + 1 :])))
    digests = {other.digest for other in changed}
    assert len(digests) == len(changed) > 80 and problem.digest not in digests


def _moved(pair: Overwrite | Part) -> list[Overwrite | Part]:
    """Pairs of the same action that say something else."""
    others: list[Overwrite | Part] = [replace(pair, read=1 - pair.read)]
    others.append(replace(pair, required=not pair.required) if isinstance(pair, Overwrite) else replace(pair, offset=9))
    return others


def test_the_text_has_a_line_for_everything() -> None:
    problem = replace(GOOD, regions=(Region("arena"), Region("host", on_device=False)))
    assert problem.as_text().splitlines() == [
        "region arena device",
        "region host host",
        "v0 'w' 64 align=64 r0 activations stored",
        "v1 'x' 128 align=64 r0 activations input",
        "v2 'a' 128 align=64 r0 activations transient",
        "v3 'b' 64 align=64 r0 activations transient",
        "v4 't' 192 align=64 r0 activations output",
        'v5 "w\'" 64 align=64 r0 activations output home=0',
        "a0 'f' (v0 v1) -> (v2) v2?v1 ws=0@r0 flops=0 bytes=0 ns=5",
        "a1 'g' (v2) -> (v3) ws=64@r0 flops=0 bytes=0 ns=0",
        "a2 'join' (v2 v3) -> (v4) v4[0]?v2 v4[128]?v3 ws=0@r0 flops=0 bytes=0 ns=0",
        "a3 'update' (v0 v3) -> (v5) v5!v0 ws=0@r0 flops=0 bytes=0 ns=0 effect",
    ]
    assert problem.as_text().endswith("\n")
    assert repr(problem) == "<Problem: 6 values, 640 B in all, 4 actions>"
