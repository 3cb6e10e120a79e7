from __future__ import annotations

from itertools import pairwise

from foreplan.planner import (
    Buffer,
    Category,
    Overwrite,
    Region,
    Role,
    Step,
    buffers,
    bytes_by_category,
    live_at,
    plan,
    without_reuse,
)
from tests.planner.problems import Maker
from tests.planner.test_verify import chain, joined
from tests.planner.texts import ARENA, problem


def test_buffers_of_a_plan_by_hand() -> None:
    problem, good = chain()
    w, x, a, b, new, y = range(6)
    assert buffers(good, problem) == (
        Buffer(w, 0, 0, 64, 0, 3, written=-1, readers=(0, 2, 3)),
        Buffer(x, 1, 0, 128, 0, 1, written=-1, readers=(0,)),
        Buffer(a, 1, 128, 128, 0, 1, written=0, readers=(1,)),
        Buffer(-1, 1, 0, 64, 1, 2),
        Buffer(b, 1, 128, 128, 1, 4, written=1, readers=(2, 3)),
        Buffer(y, 1, 0, 64, 2, 4, written=2, readers=()),
        Buffer(new, 0, 0, 64, 3, 4, written=3, readers=()),
    )
    assert [buffer.value for buffer in live_at(good, problem, 1)] == [w, -1, b]


def test_categories_of_a_plan_by_hand() -> None:
    make = Maker((Region("persistent"), Region("arena"), Region("host", on_device=False)))
    make.value("w", 100, 0, role=Role.STORED, category=Category.PARAMETERS)
    x = make.value("x", 200, role=Role.INPUT, category=Category.INPUTS)
    a = make.value("a", 200, category=Category.GRADIENTS)
    far = make.value("far", 64, 2)
    make.action("f", [x], [a, far], Overwrite(0, 0), workspace=1, workspace_region=1)
    make.action("g", [a, far], [make.value("y", 4, role=Role.OUTPUT, category=Category.OUTPUTS)])
    problem = make.problem()
    found = plan(problem)
    nothing = dict.fromkeys(Category, 0)
    held = {Category.PARAMETERS: 128, Category.GRADIENTS: 256}
    assert bytes_by_category(found, problem, 0) == {**nothing, **held, Category.WORKSPACE: 64}
    assert bytes_by_category(found, problem, 1) == {**nothing, **held, Category.OUTPUTS: 64}


def test_a_smaller_value_in_place_counts_from_the_step_after() -> None:
    asked = problem("f: x 256 input -> a 64 | a!x; g: a -> y 64 output", ARENA)
    found = plan(asked)
    assert [(b.value, b.lower, b.upper) for b in buffers(found, asked)] == [(0, 0, 1), (1, 1, 2), (2, 1, 2)]


def test_the_twin_uses_no_byte_twice() -> None:
    problem, good = chain()
    twin = without_reuse(good, problem)
    w, x, a, b, new, y = range(6)
    at = dict(twin.starts) | dict(twin.ends)
    at |= {v: o for s in twin.steps for v, o in zip(problem.actions[s.action].writes, s.writes)}
    assert at[new] == at[w] == 0
    spans = sorted((at[v], at[v] + problem.values[v].nbytes) for v in (x, a, b, y))
    spans.append((twin.steps[1].workspace, twin.steps[1].workspace + 64))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert twin.certificate.placement == "no reuse"
    assert twin.arena_bytes == 64 + 3 * 128 + 64 + 64


def test_parts_in_place_hold_their_bytes_until_the_whole_does() -> None:
    problem, good = joined()
    rows = {problem.values[b.value].name: (b.offset, b.nbytes, b.lower, b.upper) for b in buffers(good, problem)}
    assert rows == {
        "x": (384, 64, 0, 3),
        "a": (0, 64, 0, 3),
        "b": (256, 128, 1, 4),
        "c": (192, 64, 2, 3),
        "t": (0, 256, 3, 5),
        "y": (256, 64, 4, 5),
    }


def test_the_twin_of_a_plan_copies_every_part() -> None:
    problem, good = joined()
    twin = without_reuse(good, problem)
    join = twin.steps[3]
    assert all(low + 64 <= join.writes[0] or low >= join.writes[0] + 256 for low in join.reads)


def test_steps_are_plain_data() -> None:
    assert Step(0, (0,), (1,)) == Step(0, (0,), (1,), 0)
