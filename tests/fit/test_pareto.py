"""What less memory costs, and the largest batch that fits: the curve, the commands, and their errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreplan as fp
from foreplan.base.units import format_bytes
from foreplan.compiler.compiled import Compiled
from foreplan.fit.fitting import largest
from foreplan.fit.pareto import Point, pareto
from foreplan.fit.trials import Trials
from foreplan.planner import plan
from tests.cli.shell import answer, foreplan
from tests.profile import pick

MODEL = "mlp:batch=64,width=32,layers=4,inputs=16,classes=5"
SMALL = "mlp:batch=16,width=16,layers=2,inputs=8,classes=3"


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 100, 1000])
@pytest.mark.parametrize("first", [1, 5, 200])
def test_the_largest_count(limit: int, first: int) -> None:
    asked: list[int] = []

    def needed(count: int) -> int:
        asked.append(count)
        return 10 + 7 * count

    assert largest(needed, 10 + 7 * limit, first) == limit
    assert min(asked) >= 1 and len(asked) <= 25 and len(asked) == len(set(asked))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(0, 5000), st.integers(1, 400), st.data())
def test_the_largest_count_of_any_need_that_grows(
    steps: list[int], fixed: int, first: int, data: st.DataObject
) -> None:
    sums = list(accumulate(steps, initial=fixed))
    memory = data.draw(st.integers(0, sums[-1]))
    asked: list[int] = []

    def needed(count: int) -> int:
        asked.append(count)
        return _need(sums, count)

    expected = max((count for count in range(1, len(sums) + sums[-1] + 1) if _need(sums, count) <= memory), default=0)
    assert largest(needed, memory, first, data.draw(st.integers(0, 2 * fixed))) == expected
    assert min(asked) >= 1 and len(asked) == len(set(asked)) <= 40


def _need(sums: list[int], count: int) -> int:
    return sums[count] if count < len(sums) else sums[-1] + count


def test_a_need_in_proportion_takes_few_trials() -> None:
    asked: list[int] = []

    def needed(count: int) -> int:
        asked.append(count)
        return 1000 + 777 * count

    assert largest(needed, 1000 + 777 * 641 + 5, 100, 1000) == 641
    assert asked == [100, 641, 642]


def test_needs_that_do_not_grow_steadily_give_an_edge() -> None:
    def needed(count: int) -> int:
        return 100 * count + (37 * count * count) % 450

    for memory in range(200, 20_000, 333):
        count = largest(needed, memory, 50)
        assert (not count or needed(count) <= memory) and needed(count + 1) > memory


def test_the_curve_falls_in_bytes_and_rises_in_cost() -> None:
    graph = fp.models.build(pick(MODEL, MODEL, "conv_chain:batch=2"))
    step = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.SGD(0.1), remat="off", fission="off")
    points = pareto(step)
    assert points[0].arena_bytes == step.plan.arena_bytes
    assert points[0].extra_flops_ratio == points[0].extra_seconds_ratio == 0
    arenas = [point.arena_bytes for point in points]
    assert arenas == sorted(set(arenas), reverse=True) and len(points) > 3
    for i, point in enumerate(points):
        assert point.lower_bound_bytes <= point.arena_bytes == point.budget_bytes < point.peak_bytes
        assert all(other.extra_seconds_ratio > point.extra_seconds_ratio for other in points[i + 1 :])
    for share in (0.01, 0.05, 0.2):
        within = [point for point in points if point.extra_seconds_ratio <= share]
        assert min(point.arena_bytes for point in within) <= points[0].arena_bytes


def test_pareto_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer("pareto", SMALL)["points"]
    keys = {"budget_bytes", "peak_bytes", "arena_bytes", "extra_flops_ratio", "extra_seconds_ratio"}
    assert keys <= set(found[0])
    assert all(point["host_bytes"] == 0 for point in found)
    estimated = answer("estimate", SMALL, "--remat", "off")
    assert found[0]["arena_bytes"] == estimated["arena_bytes"]
    estimated = answer("estimate", SMALL, "--budget", found[-1]["budget_bytes"])
    assert estimated["arena_bytes"] <= found[-1]["arena_bytes"] < found[0]["arena_bytes"]
    monkeypatch.setattr("foreplan.fit.pareto.pareto", lambda *_: [Point(**point) for point in found])
    lines = foreplan("pareto", SMALL).stdout.splitlines()
    assert len(lines) == len(found) + 1 and lines[1].count("█") == 40
    foreplan("pareto", SMALL, "--budget", "1GiB", code=2)


@pytest.mark.thorough
@pytest.mark.whole_search  # as the commands do
@pytest.mark.parametrize("step", [(MODEL,), ("conv_chain:size=32", "--infer"), ("conv_chain:batch=2,size=16",)])
def test_a_point_of_the_curve_is_what_its_budget_gives(step: tuple[str, ...]) -> None:
    points = answer("pareto", *step)["points"]
    assert step != (MODEL,) or (not points[0]["in_parts"] and points[-1]["in_parts"])
    assert step[-1] != "--infer" or [point["in_parts"] for point in points] == [False] + [True] * (len(points) - 1)
    for point in points[:: pick(8, 8, 4)]:
        estimated = answer("estimate", *step, "--budget", point["budget_bytes"])
        assert estimated["arena_bytes"] <= point["arena_bytes"]
        assert estimated["extra_seconds_ratio"] <= point["extra_seconds_ratio"] + 1e-12
        assert any("what runs in parts was chosen" in note for note in estimated["notes"]) == point["in_parts"], point


WIDE = "mlp:batch=512,width=256,layers=4,inputs=16,classes=5"


def test_points_with_copies_tell_the_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied are activations, of which each large one has 512 x 256 elements."""
    graph = fp.models.build(WIDE)
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1), remat="off", offload=True, fission="off")
    points = pareto(step)
    hosts = [point.host_bytes for point in points]
    assert hosts[0] == 0 < max(hosts)
    assert all(nbytes % (512 * 256 * 4) == 0 for nbytes in hosts)
    monkeypatch.setattr("foreplan.fit.pareto.pareto", lambda *_: points)
    header, *lines = foreplan("pareto", WIDE, "--offload").stdout.splitlines()
    assert header.split() == ["arena", "host", "time", "flops", "instructions"]
    assert [" ".join(line.split()[2:4]) for line in lines] == [format_bytes(nbytes) for nbytes in hosts]


@pytest.mark.thorough
def test_what_fits_with_copies_tells_the_host_memory() -> None:
    """Without parts, which would serve here as well."""
    copying = WIDE, "--offload", "--fission", "off"
    text = foreplan("fit", *copying, "--memory", "3MiB", "--batch", 600).stdout
    same = answer("estimate", *copying, "--budget", "3MiB", "--batch", text.split()[1].rstrip(":"))
    assert same["host_bytes"] > 0 and f", {format_bytes(same['host_bytes'])} of host memory, " in text


@pytest.mark.thorough
def test_fit_command() -> None:
    small = "mlp:width=16,layers=2,inputs=8,classes=3"
    memory = answer("estimate", small, "--batch", 13, "--remat", "off")["arena_bytes"]
    found = answer("fit", small, "--memory", memory, "--max-extra-time", "0%")
    assert found["batch"] >= 13 and found["arena_bytes"] <= memory and found["extra_flops_ratio"] == 0
    more = answer("estimate", small, "--batch", found["batch"] + 1, "--remat", "off")["arena_bytes"]
    assert more > memory
    recomputing = answer("fit", small, "--memory", memory)
    assert recomputing["host_bytes"] == 0
    assert recomputing["batch"] >= found["batch"] and recomputing["arena_bytes"] <= memory
    for batch, code in ((recomputing["batch"], 0), (recomputing["batch"] + 1, 3)):
        answer("estimate", small, "--batch", batch, "--budget", memory, code=code)
    assert answer("fit", small, "--memory", "1KiB", code=3)["error"] == "does not fit"
    for bad in ("-1", "much", "5%%"):
        foreplan("fit", small, "--memory", "1GiB", "--max-extra-time", bad, code=2)


def two_speeds(batch: int) -> fp.Program:
    """A step in which each action has a slow candidate of less scratch memory, which a plan takes where memory is
    short.
    """
    graph = fp.models.build(f"mlp:batch={batch},width=32,layers=2,inputs=16,classes=5")
    program = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), remat="off").program
    fast = [replace(a, workspace=a.workspace if a.effect else a.workspace + (1 << 16)) for a in program.actions]
    pure = [i for i, action in enumerate(program.actions) if not action.effect]
    slow = [replace(program.actions[i], nanoseconds=3 * program.actions[i].nanoseconds + 1) for i in pure]
    calls = (*program.calls, *[program.calls[i] for i in pure])
    return replace(program, actions=(*fast, *slow), calls=calls)


def test_the_limit_on_added_time_counts_slower_kernels() -> None:
    """They add no flops."""

    def compile_at(batch: int) -> Compiled:
        program = two_speeds(batch)
        return Compiled(program, plan(program, remat="off"))

    memory = compile_at(64).arena_bytes
    found = {}
    for share in (0.0, 0.3, None):
        trials = Trials(compile_at, memory, share)
        figures = trials.cheapest(trials.largest()).estimate()
        found[share] = figures["extra_seconds_ratio"]
        assert figures["arena_bytes"] <= memory
    assert found[0.0] == 0 < found[0.3] <= 0.3 < found[None], found


def test_added_cost_is_beyond_the_fastest_kernels_whatever_a_plan_chose() -> None:
    program = two_speeds(64)
    usual = Compiled(program, plan(program, budget="1GiB")).estimate()
    tight = Compiled(program, plan(program, budget=0.95)).estimate()
    assert usual["extra_seconds_ratio"] == 0 and tight["extra_seconds_ratio"] > 0.05
    assert tight["predicted_seconds"] == pytest.approx(
        usual["predicted_seconds"] * (1 + tight["extra_seconds_ratio"]), rel=1e-9
    )
    points = pareto(Compiled(program, plan(program, remat="off")))
    assert points[0].extra_seconds_ratio == 0
    for point in (points[0], points[len(points) // 2], points[-1]):
        same = Compiled(program, plan(program, budget=point.arena_bytes)).estimate()
        assert same["extra_seconds_ratio"] <= point.extra_seconds_ratio + 1e-12
