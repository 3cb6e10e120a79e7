"""Problems and plans as text, in the signs of `Problem.as_text`.

    w 64 stored                    # a value and its bytes
    f: x 256 input, w -> a 256     # an action, what it reads and what it writes; values may be declared here as well
    g: a -> b 128, t 512 | b?a ws=64 effect

Behind the bar: `b?a`, b may take the bytes of a; `b!a`, it must; `t[64]?a`, a may lie in t from its byte 64 on. Values
are transient, `input`, `output` or `stored`, further `align=32`, `home=w` or `@host`. What is stored or has a home lies
in the first region, all else in the arena.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from foreplan.planner import Action, Certificate, Overwrite, Part, Plan, Problem, Region, Role, Step, Value
from tests.planner.problems import REGIONS

ARENA = (Region("arena"),)


def _index(regions: Sequence[Region], name: str) -> int:
    return next((i for i, region in enumerate(regions) if region.name == name), 0)


def lines(text: str) -> list[str]:
    return [line.strip() for line in re.split(r"[;\n]", text.strip())]


def problem(text: str, regions: tuple[Region, ...] = REGIONS) -> Problem:
    """What a text says: values and actions, a line each, or with semicolons between them."""
    values: dict[str, Value] = {}
    places: dict[str, int] = {}

    def named(listed: str) -> tuple[int, ...]:
        """The values of a list, those declared that have a size."""
        items = [each.split() for each in listed.split(",") if each.strip()]
        for name, *words in items:
            if not words:
                continue
            nbytes, *more = words
            given = dict(word.split("=") for word in more if "=" in word)
            role = next((Role[word.upper()] for word in more if word.isalpha()), Role.TRANSIENT)
            home = places.get(given.get("home", ""), -1)
            at = "" if role is Role.STORED or home >= 0 else "arena"
            region = _index(regions, next((word[1:] for word in more if word[0] == "@"), at))
            values[name] = Value(name, int(nbytes), int(given.get("align", 64)), region, role=role, home=home)
            places[name] = len(places)
        return tuple(places[name] for name, *_ in items)

    actions = []
    for line in filter(None, lines(text)):
        name, sign, rest = line.partition(": ")
        if not sign:
            named(line)
            continue
        flow, _, marks = rest.partition("|")
        reads, writes = map(named, flow.split("->"))
        pairs = re.findall(r"(\S+?)(?:\[(\d+)\])?([?!])(\S+)", marks)
        found = [(writes.index(places[w]), reads.index(places[r]), at, sign) for w, at, sign, r in pairs]
        figures = {key: (int(number), at) for key, number, at in re.findall(r"(\w+)=(\d+)@?(\w*)", marks)}
        (workspace, where), (nanoseconds, _) = figures.get("ws", (0, "")), figures.get("ns", (0, ""))
        over = tuple(Overwrite(w, r, sign == "!") for w, r, at, sign in found if not at)
        parts = tuple(Part(w, r, int(at)) for w, r, at, _ in found if at)
        scratch = (workspace, _index(regions, where or "arena"))
        effect = "effect" in marks.split()
        actions.append(Action(name, reads, writes, over, *scratch, nanoseconds=nanoseconds, effect=effect, parts=parts))
    return Problem(tuple(values.values()), tuple(actions), regions)


def hand_plan(of: Problem, text: str, heights: Sequence[int], live: Sequence[int]) -> Plan:
    """A plan of a problem: what lies where at the start, steps such as `f: x@0 -> a@64 ws@128`, and what lies where at
    the end. `live` is the live set of each step.
    """
    numbers = {value.name: i for i, value in enumerate(of.values)}
    actions = {action.name: i for i, action in enumerate(of.actions)}

    def offsets(listed: str) -> dict[str, int]:
        return {name: int(at) for name, at in (each.split("@") for each in listed.split())}

    first, *middle, last = lines(text)
    steps = []
    for line in middle:
        name, _, flow = line.partition(": ")
        reads, writes = map(offsets, flow.split("->"))
        workspace = writes.pop("ws", 0)
        steps.append(Step(actions[name], tuple(reads.values()), tuple(writes.values()), workspace))
    starts, ends = (tuple((numbers[name], at) for name, at in offsets(each).items()) for each in (first, last))
    peak = max(live, default=0)
    certificate = Certificate(list(live).index(peak) if live else 0, "by hand", "by hand")
    return Plan(of.digest, tuple(steps), starts, ends, tuple(heights), sum(heights), peak, None, certificate)
