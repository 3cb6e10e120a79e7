"""The numbers of a plan worked out by hand."""

from __future__ import annotations

import json

import pytest

from foreplan.base.outside import Part
from foreplan.planner import plan
from foreplan.planner.problem import Action, Category, Overwrite, Problem, Region, Role, Value
from foreplan.planner.verify.verifier import verify
from foreplan.report.memory import Memory, does_not_fit
from tests.views.small import KIB, small


@pytest.fixture
def memory() -> Memory:
    return Memory.of(*small())


def test_the_example_is_a_plan(memory):
    verify(memory.plan, memory.problem)


def test_sizes(memory):
    assert memory.peak == memory.arena == memory.lower_bound == 17 * KIB
    assert memory.order_lower_bound is None
    assert memory.persistent == 4 * KIB
    assert memory.workspace == 3 * KIB
    assert memory.peak_step == 0
    assert memory.live.tolist() == [17 * KIB, 13 * KIB, 5 * KIB]
    assert Memory(memory.problem, memory.plan, outside=(Part("context", KIB, "assumed", "a guess"),)).peak == 18 * KIB


def test_categories_at_the_peak(memory):
    assert list(memory.categories) == list(Category)
    assert memory.categories == {
        Category.PARAMETERS: 4 * KIB,
        Category.OPTIMIZER_STATE: 0,
        Category.GRADIENTS: 0,
        Category.ACTIVATIONS: 8 * KIB,
        Category.WORKSPACE: 3 * KIB,
        Category.COMMUNICATION: 0,
        Category.INPUTS: 2 * KIB,
        Category.OUTPUTS: 0,
    }


def test_what_is_alive_when(memory):
    assert [(b.name, b.nbytes) for b in memory.at(0)] == [
        ("a", 8 * KIB),
        ("w", 4 * KIB),
        ("forward (workspace)", 3 * KIB),
        ("x", 2 * KIB),
    ]
    assert [b.name for b in memory.at(1)] == ["a", "w", "g"]
    assert sum(b.nbytes for b in memory.at(-1)) == 5 * KIB
    a, g = memory.at(1)[0], memory.at(1)[2]
    assert (a.producer, a.lower, a.upper, a.region, a.offset) == ("forward", 0, 2, "arena", 2 * KIB)
    assert (g.producer, g.lower, g.upper, g.category) == ("backward", 1, 3, Category.GRADIENTS)
    assert memory.at(0)[3].producer == ""
    w = memory.at(0)[1]  # with its content for the next step
    assert (w.lower, w.upper, w.producer) == (0, 3, "update")
    assert [b.name for b in memory.largest(2)] == ["a", "w"]
    for step in (3, -4):
        with pytest.raises(IndexError, match="the plan has 3"):
            memory.at(step)


def test_as_json_is_exact(memory):
    data = json.loads(json.dumps(memory.as_json()))
    assert data["peak_bytes"] == data["arena_bytes"] == 17408
    assert data["peak_action"] == "forward"
    assert data["categories"]["workspace"] == 3072
    assert data["largest"][0] | {"name": "a", "nbytes": 8192} == data["largest"][0]


def test_as_table(memory):
    text = str(memory)
    assert "17.00 KiB" in text and "17,408 bytes" in text
    assert "reached" in text
    assert "peak at instruction 0 of 3, forward: 17.00 KiB alive" in text
    assert "[0, 2)" in text
    assert all(len(line) <= 160 and line == line.rstrip() for line in text.splitlines())


def test_long_and_hostile_names_stay_on_their_line():
    problem, plan = small(evil=True)
    text = str(Memory.of(problem, plan))
    assert "alert(1)" in text  # a terminal interprets no markup
    object.__setattr__(problem.values[2], "name", "a\x1b[2J\n" + "x" * 500)
    text = str(Memory.of(problem, plan))
    assert "\x1b" not in text and "…" in text
    assert max(map(len, text.splitlines())) < 180


def test_does_not_fit_says_all_that_is_asked(memory):
    whole = does_not_fit(memory, 20 * KIB, 19 * KIB)
    assert "1.00 KiB too much" in whole and "20,480 bytes: the arena, and 3.00 KiB outside it" in whole
    text = does_not_fit(memory, 17 * KIB, 10 * KIB, ["a smaller batch"])
    for part in ("7.00 KiB too much", "17,408 bytes", "10,240 bytes", "lower bound", "instruction 0 of 3, forward"):
        assert part in text
    assert text.endswith("try next:\n  - a smaller batch")


def test_a_compiled_model_adds_up():
    import foreplan

    graph = foreplan.models.mlp(batch=16, width=32, layers=2)
    step = foreplan.compile(graph, loss=foreplan.losses.cross_entropy, optimizer=foreplan.optim.Adam())
    memory = step.memory
    assert sum(memory.categories.values()) == memory.lower_bound == memory.live.max() == memory.live[memory.peak_step]
    weights = {b.name: b for b in memory.buffers if b.name.endswith("weight")}
    hidden = weights["hidden0.weight"]
    assert hidden.shape == "float32[32,784]" and hidden.nbytes == 4 * 32 * 784
    assert (hidden.lower, hidden.upper) == (0, len(step.plan.steps))
    assert memory.categories[Category.OPTIMIZER_STATE] >= 2 * sum(b.nbytes for b in weights.values())
    # No two buffers that are alive together share a byte, and none reaches past the end of its region.
    heights = {region.name: height for region, height in zip(memory.problem.regions, memory.plan.heights)}
    for i, a in enumerate(memory.buffers):
        assert a.offset + a.nbytes <= heights[a.region]
        for b in memory.buffers[:i]:
            together = a.region == b.region and a.lower < b.upper and b.lower < a.upper
            assert not (together and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes), (a, b)


def test_a_stored_value_whose_update_comes_first_is_one_buffer_throughout():
    values = (
        Value("step", 8, region=0, category=Category.OPTIMIZER_STATE, role=Role.STORED),
        Value("step/next", 8, region=0, category=Category.OPTIMIZER_STATE, role=Role.OUTPUT, home=0),
        Value("rate", 4, region=1),
    )
    count = Action("count", (0,), (1,), overwrites=(Overwrite(0, 0, required=True),), effect=True)
    actions = (count, Action("rate", (1,), (2,)), Action("use", (2,), (), effect=True))
    problem = Problem(values, actions, (Region("persistent"), Region("arena")))
    (found, rate) = Memory.of(problem, plan(problem)).buffers
    assert (found.name, found.nbytes, found.lower, found.upper) == ("step", 8, 0, 3)
    assert (found.producer, found.written, found.readers) == ("count", 0, (0, 1))
    assert (rate.name, rate.lower, rate.upper) == ("rate", 1, 3)
