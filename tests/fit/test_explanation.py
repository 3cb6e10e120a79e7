"""Why a step needs its memory: each figure is what compiling so gives, and words follow from the plan's own steps."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.planner import totals
from foreplan.report.explanation import Change, Explanation
from foreplan.report.timeline import Phase
from tests.cli.shell import answer, foreplan
from tests.profile import pick

SMALL = "mlp:batch=4,width=8,layers=1,inputs=6,classes=3"


def build(batch: int = 4) -> fp.Graph:
    return fp.models.build(f"unet:batch={batch},size=64,width=8")


def step(**options: Any) -> fp.Compiled:
    return fp.compile(build(), fp.losses.cross_entropy, fp.optim.Nesterov(0.1), **options)


@pytest.fixture(scope="module")
def made() -> fp.Compiled:
    return step()


@pytest.fixture(scope="module")
def told(made: fp.Compiled) -> Explanation:
    return made.explain(build)


def by_flags(told: Explanation) -> dict[str, Change]:
    return {each.how.partition(" ")[0] if "budget" in each.how else each.how: each for each in told.changes}


CHANGES: dict[str, dict[str, Any]] = {
    "--workspace 0": {"workspace": 0},
    "--precision bf16": {"precision": "bf16"},
    "--freeze '*' --train out": {"freeze": ["*"], "train": ["out"]},
    "--batch 2": {},
    "--batch 2 --accumulate 2": {"accumulate": 2},
}


@pytest.mark.parametrize("how", CHANGES)
def test_changes_bring_what_compiling_so_gives(told: Explanation, made: fp.Compiled, how: str) -> None:
    found, now = by_flags(told)[how], made.estimate()["predicted_seconds"]
    graph = build(2 if "--batch 2" in how else 4)
    other = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1), **CHANGES[how])
    assert found.arena_bytes == other.arena_bytes
    samples = 2 if how == "--batch 2" else 4
    ratio = other.estimate()["predicted_seconds"] / samples / (now / 4) - 1
    assert found.seconds_ratio == pytest.approx(ratio)


def test_recomputation_keeps_within_its_share_and_the_budget_gives_it(told: Explanation) -> None:
    shares = [each for each in told.changes if each.how.startswith("--budget")]
    assert shares
    least = told.memory.arena
    for each in shares:
        share = float(each.name.split("+")[1].split("%")[0]) / 100
        assert each.arena_bytes is not None and each.arena_bytes < least
        least = each.arena_bytes
        if each not in shares[-pick(1, 1, 9) :]:
            continue
        other = step(budget=each.how.split()[1])
        extra = totals(other.program, [[run.action for run in other.plan.steps]])[0].extra_seconds_ratio
        assert other.arena_bytes <= float(each.how.split()[1].removesuffix("MiB")) * (1 << 20)
        assert extra <= share + 1e-9


def test_what_lives_at_the_peak_waits_for_its_next_reader(told: Explanation) -> None:
    problem, plan, peak = told.memory.problem, told.memory.plan, told.memory.peak_step
    assert [each.buffer for each in told.held] == list(told.memory.largest(5)) and len(told.held) == 5
    for each in told.held:
        if each.buffer.value < 0:
            assert (each.buffer.lower, each.buffer.upper) == (peak, peak + 1) and "scratch" in each.since
            continue
        value = next(i for i, v in enumerate(problem.values) if v.name == each.buffer.name)
        readers = [i for i, run in enumerate(plan.steps) if value in problem.actions[run.action].reads and i >= peak]
        if "next read" in each.waits:
            assert f"instruction {readers[0]})" in each.waits
            assert problem.actions[plan.steps[readers[0]].action].name in each.waits
        elif "read by this" in each.waits:
            assert readers[0] == peak


def test_words_are_about_the_peak(told: Explanation) -> None:
    peak, text = told.memory.peak_step, str(told)
    assert told.memory.action_at(peak) in told.words[0] and f"instruction {peak} of" in told.words[0]
    phase = told.timeline.phases[peak]
    where = {Phase.FORWARD: "forward pass", Phase.BACKWARD: "backward pass", Phase.UPDATE: "update"}
    assert where[phase] in told.words[0]
    for line in ("The largest things there:", "What the planner has done:", "What would change it"):
        assert line in text
    for each in told.changes:
        assert each.how in text


def test_the_largest_categories_are_named_with_their_shares(told: Explanation) -> None:
    alive = sum(told.memory.categories.values())
    nbytes, kind = max((nbytes, kind) for kind, nbytes in told.memory.categories.items())
    assert f"{nbytes / alive:.0%} are {kind}" in told.words[1].replace("the optimizer's state", "optimizer_state")


def test_what_cannot_be_done_says_why() -> None:
    def refuses(batch: int) -> fp.Graph:
        raise UsageError(f"no batch of {batch} with this model")

    told = fp.compile(fp.models.build(SMALL), fp.losses.cross_entropy, fp.optim.SGD(0.1)).explain(refuses)
    (refused,) = [each for each in told.changes if each.arena_bytes is None]
    assert refused.note == "no batch of 2 with this model"
    assert "cannot be" in str(told) and refused.note in str(told)


def test_inference_has_no_backward_to_wait_for() -> None:
    told = fp.compile(build()).explain(build)
    flags = by_flags(told)
    assert set(flags) <= {"--batch 2", "--workspace 0", "--budget"} and "--batch 2" in flags
    assert not any("backward" in text for each in told.held for text in (each.since, each.waits, *told.words))


def test_a_plan_file_has_no_model_to_change(tmp_path: Path, told: Explanation, made: fp.Compiled) -> None:
    made.save(path := tmp_path / "step.plan")
    loaded = fp.load_plan(path).explain()
    assert all(each.how.startswith("--budget") for each in loaded.changes) and loaded.changes
    assert loaded.held == told.held and loaded.words == told.words
    assert foreplan("explain", path).stdout.startswith(told.words[0])


def test_micro_batches_are_explained_by_their_larger_half() -> None:
    small = partial(fp.models.mlp, width=8, layers=1, inputs=6, classes=3)
    made = fp.compile(small(4), fp.losses.cross_entropy, fp.optim.Nesterov(0.1), accumulate=2)
    told = made.explain(small)
    assert told.memory.arena == made.arena_bytes
    assert "--batch 2 --accumulate 2" not in by_flags(told)  # it has micro-batches already
    assert by_flags(told)["--batch 2"].arena_bytes is not None


def test_an_empty_step() -> None:
    told = fp.compile(fp.trace(lambda x: {"y": x}, fp.spec((2,)))).explain()
    assert str(told)


def test_the_command(tmp_path: Path) -> None:
    found = answer("explain", SMALL)
    small = partial(fp.models.mlp, width=8, layers=1, inputs=6, classes=3)
    told = fp.compile(small(4), fp.losses.cross_entropy, fp.optim.Nesterov(0.1)).explain(small)
    assert found["arena_bytes"] == told.memory.arena and found["words"] == list(told.words)
    assert {each["how"] for each in found["changes"]} == {each.how for each in told.changes}
    assert json.loads(json.dumps(found)) == found
    assert foreplan("explain", SMALL).stdout == str(told)
