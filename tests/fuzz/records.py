"""Records of a file, such as a plan's, with changes that somebody has made of them: drawn, and applied."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from foreplan.base.errors import ForeplanError
from foreplan.planner import Problem, verify
from foreplan.planner.records import plan_of

Data = dict[str, Any]
Place = list[Any]  # keys and indices that lead to a node of the records


def draw_edits(rng: random.Random, data: Data) -> list[Any]:
    """Changes of records: see `_edit`."""
    return [_edit(rng, data) for _ in range(rng.choice([1, 1, 1, 2, 3, 5]))]


def _edit(rng: random.Random, data: Data) -> list[Any]:
    """[how, place, …]: see `_apply`."""
    place = _place(rng, data)
    if rng.random() < 0.25:
        ops = [each for each in _places(data) if each[-1:] == ["op"] or (each[:1] == ["slots"] and len(each) > 2)]
        place = rng.choice(ops or [place])
    node, how = _at(data, place), rng.random()
    if how < 0.03:
        return ["damage", rng.random(), rng.choice('0123456789"[]{},:x-.e\\\u00e9')]
    if how < 0.06:
        return ["deep", place, rng.choice([10, 1000, 200_000])]
    if how < 0.15:
        return ["drop", place]
    if how < 0.22:
        return ["twice", place, rng.randrange(100)]
    if how < 0.52:
        return ["as", place, _like(rng, data, place)]
    if how < 0.66:
        return ["swap", place, _like(rng, data, place)]
    return ["set", place, _another(rng, node)]


def _place(rng: random.Random, data: Data) -> Place:
    """A way down from the top, each section as likely as the next."""
    node: Any = data
    place: Place = []
    while isinstance(node, dict | list) and node and (len(place) < 2 or rng.random() < 0.85):
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not place and key in ("format", "sha256"):
            continue
        place.append(key)
        node = node[key]
    return place


def _like(rng: random.Random, data: Data, place: Place) -> Place:
    """The place of the same kind of thing in another record, if there is one."""
    wanted = tuple("#" if isinstance(key, int) else key for key in place)
    alike = [each for each in _places(data) if tuple("#" if isinstance(k, int) else k for k in each) == wanted]
    return rng.choice(alike) if alike else place


def _places(node: Any, place: Place | None = None) -> Iterator[Place]:
    place = place or []
    yield place
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from _places(node[key], [*place, key])


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_WORDS = ("float32", "float64", "int64", "bool", "int8", "True", "None", "input", "state", "constant", "accumulator")


def _another(rng: random.Random, node: Any) -> Any:
    """Something else in the place of a node, often of its own kind."""
    odd = [
        None,
        True,
        "",
        "x",
        [],
        {},
        0,
        -1,
        1.5,
        1 << 40,
        1 << 61,
        1 << 62,
        10**30,
        [0],
        {"a": 0},
        float("nan"),
        -(1 << 61),
    ]
    if rng.random() < 0.2 or node is None or isinstance(node, dict):
        return rng.choice(odd)
    if isinstance(node, bool):
        return not node
    if isinstance(node, int):
        return rng.choice([node + 1, node - 1, node + 64, node - 64, 2 * node, node // 2, -node, 0, 1, 2, float(node)])
    if isinstance(node, list):
        made = copy.copy(node)
        rng.shuffle(made)
        return rng.choice([made, node[1:], node[:-1], [*node, *node], [node], [*node, 0]])
    if isinstance(node, str):
        return _other_text(rng, node)
    return rng.choice(odd)


def _other_text(rng: random.Random, text: str) -> str:
    """Another number or word in a text, or a piece less."""
    numbers, names = list(_NUMBER.finditer(text)), list(_WORD.finditer(text))
    if numbers and rng.random() < 0.6:
        found = rng.choice(numbers)
        new = rng.choice(
            ["0", "1", "2", "3", "-1", "7", "100000", "1.5", "'1'", "(1,)", "1e999", "9" * 30, "None", "-3"]
        )
    elif names:
        found = rng.choice(names)
        new = rng.choice([*_WORDS, *(each[0] for each in names), "nan", "inf", "a0", "a1", "exp", "reduce"])
    else:
        return text + rng.choice(["x", ")", "(1,)", "\0", "\u2028"])
    return text[: found.start()] + new + text[found.end() :]


def applied(data: Data, edits: list[Any]) -> tuple[Data, list[Any]]:
    """A copy of records with all changes but those of the text, and these."""
    data = copy.deepcopy(data)
    for edit in edits:
        if edit[0] != "damage":
            with suppress(KeyError, IndexError, TypeError):  # an edit before has taken what this one means
                _apply(data, *edit)
    return data, [edit for edit in edits if edit[0] == "damage"]


def deepened(text: str) -> str:
    """With lists within lists where a record says so."""
    return re.sub('"deep ([0-9]+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)


def damaged(text: str, damage: list[Any]) -> str:
    """With another character at one place."""
    _, where, character = damage
    at = int(where * (len(text) - 4))
    return f"{text[:at]}{character}{text[at + 1 :]}"


def _apply(data: Data, how: str, place: Place, argument: Any = None) -> None:
    holder, key = _at(data, place[:-1]), place[-1]
    node = holder[key]
    if how == "drop":
        del holder[key]
    elif how == "twice" and isinstance(holder, list):
        holder.insert(argument % (len(holder) + 1), copy.deepcopy(node))
    elif how == "deep":
        holder[key] = f"deep {argument}"
    elif how == "as":
        holder[key] = copy.deepcopy(_at(data, argument))
    elif how == "swap":
        other, there = _at(data, argument[:-1]), argument[-1]
        holder[key], other[there] = other[there], node
    elif how == "set":
        holder[key] = argument


def _at(data: Any, place: Place) -> Any:
    for key in place:
        data = data[key]
    return data


_FIGURES = re.compile(
    r"(arena_bytes) is \S+, but the device's heights come to (\d+)|"
    r"(lower_bound_bytes) is \S+, but the highest live set is (\d+)|"
    r"(peak_step) is \S+, but the live set is highest at step (\d+)"
)


def set_figures(records: Data, problem: Problem) -> None:
    """Make the figures of a plan those that follow from its steps, as far as the verifier says what they are."""
    for _ in range(4):
        try:
            verify(plan_of(records), problem)
            return
        except ForeplanError as error:
            found = _FIGURES.search(str(error))
            if found is None:
                return
            name, number = (each for each in found.groups() if each is not None)
            holder = records["plan"]["certificate"] if name == "peak_step" else records["plan"]
            holder[name] = int(number)
