"""The two halves of a step that accumulates gradients: one arena, one plan file, one checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.graph import Kind
from foreplan.planner import without_reuse
from foreplan.runtime.planfile import plan_text
from foreplan.runtime.session import Session
from foreplan.runtime.update import Update
from tests.runtime.micro_batches import compiled, data_for, perceptron, same
from tests.runtime.test_planfile import NOISE, edited, refusals, refused
from tests.runtime.test_session import classifier


def test_planned_equals_unplanned_and_poison_changes_nothing(halves: fp.Compiled) -> None:
    assert halves.update is not None
    update = halves.update
    apart = Update(3, update.program, without_reuse(update.plan, update.program))
    unplanned = Session(halves.program, without_reuse(halves.plan, halves.program), update=apart, seed=4)
    sessions = [halves.bind(seed=4), unplanned, halves.bind(seed=4, poison=True)]
    for seed in range(3):
        data = data_for(halves, seed, (3,))
        assert len({session.step(data).loss for session in sessions}) == 1
    assert same(sessions[0], sessions[1]) and same(sessions[0], sessions[2])


def test_what_was_planned_is_what_is_allocated(halves: fp.Compiled) -> None:
    assert halves.update is not None
    session = halves.bind()
    assert session.allocated_bytes == halves.arena_bytes == halves.memory.arena == halves.estimate()["arena_bytes"]
    assert halves.arena_bytes == max(halves.plan.arena_bytes, halves.update.plan.arena_bytes)


def test_both_halves_keep_everything_in_the_same_bytes(halves: fp.Compiled) -> None:
    assert halves.update is not None
    kept = []
    for program, plan in ((halves.program, halves.plan), (halves.update.program, halves.update.plan)):
        starts = dict(plan.starts)
        kept.append({slot.name: starts[slot.operand.value] for slot in program.stored})
    assert kept[0] == kept[1]
    assert {slot.name for slot in halves.program.stored if slot.kind is Kind.ACCUMULATOR} == {
        *(f"{name}/gradient" for name in halves.bind().parameters),
        "loss_sum",
        "micro_batches",
    }


def test_an_update_that_needs_the_most_is_what_the_budget_is_compared_with() -> None:
    step = compiled(perceptron(1), fp.optim.Adam(), accumulate=2)
    assert step.update is not None and step.update.plan.arena_bytes > step.plan.arena_bytes
    assert step.arena_bytes == step.memory.arena == step.update.plan.arena_bytes
    assert str(step.memory).startswith("the update after 2 micro-batches (the body, run for each of them, needs ")
    assert compiled(perceptron(1), fp.optim.Adam(), accumulate=2, budget=step.arena_bytes).arena_bytes
    with pytest.raises(fp.DoesNotFitError):
        compiled(perceptron(1), fp.optim.Adam(), accumulate=2, budget=step.arena_bytes - 64)


def test_a_plan_file_holds_both_halves(tmp_path: Path, halves: fp.Compiled) -> None:
    halves.save(tmp_path / "step.plan")
    again = fp.load_plan(tmp_path / "step.plan")
    assert again.update is not None and halves.update is not None
    assert (again.plan, again.update.plan) == (halves.plan, halves.update.plan)
    assert again.update.micro_batches == 3
    data = data_for(halves, 0, (3,))
    first, second = halves.bind(seed=1), again.bind(seed=1)
    assert first.step(data).loss == second.step(data).loss and same(first, second)
    again.save(tmp_path / "again.plan")
    assert (tmp_path / "again.plan").read_bytes() == (tmp_path / "step.plan").read_bytes()
    seconds = {"plan_seconds": 0.0, "compile_seconds": 0.0}
    of_the_process = seconds | {
        "nodes": 0,
        "peak_bytes": 0,
        "whole_bytes": 0,
        "outside": (),
    }  # which has compiled it or not
    assert again.estimate() | of_the_process == halves.estimate() | of_the_process


def test_how_many_micro_batches_there_are_stands_in_one_place(tmp_path: Path, halves: fp.Compiled) -> None:
    halves.save(tmp_path / "three.plan")
    text = (tmp_path / "three.plan").read_text()
    (tmp_path / "two.plan").write_text(edited(text, lambda data: data.update(micro_batches=2)))
    wanted = compiled(classifier(batch=4, dropout=0.3), fp.optim.AdamW(1e-2, clip_norm=0.5), accumulate=2)
    ours, theirs = fp.load_plan(tmp_path / "two.plan").bind(seed=1), wanted.bind(seed=1)
    for seed in range(2):
        data = data_for(halves, seed, (2,))
        assert ours.step(data).loss == theirs.step(data).loss
    assert same(ours, theirs)


def step_count(data: dict[str, Any]) -> list[Any]:
    """The operand that is the next content of the count of steps."""
    written = [operand for action in data["actions"] for operand in action["out"]]
    found: list[Any] = next(o for o in written if o[2] == "int64[]" and len(data["values"][o[0]]) > 6)
    return found


HARMFUL = {
    "a single micro-batch": (lambda data: data.update(micro_batches=1), "needs 2 micro-batches"),
    "no number of micro-batches": (lambda data: data.update(micro_batches="3"), "damaged"),
    "a step of the update dropped": (lambda data: data["update"]["steps"].pop(3), "step"),
    "a stored value renamed": (
        lambda data: next(s for s in data["update"]["slots"] if s["role"] == "stored").update(name="other"),
        "'other': a stored value needs a first content",
    ),
    "an accumulator taken for a state": (
        lambda data: next(s for s in data["update"]["slots"] if s.get("kind") == "accumulator").update(kind="state"),
        "its category is gradients, and must be optimizer_state",
    ),
    "two stored values swapped": (
        lambda data: data["update"]["slots"][2].update(name=data["update"]["slots"][3]["name"]),
        "two inputs and stored values are named",
    ),
    "another target": (lambda data: data["header"].update(target="tpu"), "no target"),
    "the update alone dropped": (lambda data: (data.pop("update"), data.pop("micro_batches")), "but not the second"),
    "an update with a result": (
        lambda data: data["update"]["slots"].append({"role": "output", "name": "y", "at": step_count(data["update"])}),
        "returns something, which nobody reads",
    ),
    "an input of the update without a default": (
        lambda data: next(s for s in data["update"]["slots"] if s["role"] == "input").pop("init"),
        "and has no default for it",
    ),
    "a first content of a sum": (
        lambda data: next(s for s in data["slots"] if s.get("kind") == "accumulator").update(init="fill(1)"),
        "is zero at first",
    ),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_halves_that_do_not_fit_each_other_are_refused(tmp_path: Path, halves: fp.Compiled, name: str) -> None:
    edit, match = HARMFUL[name]
    halves.save(tmp_path / "step.plan")
    refused(tmp_path, edited((tmp_path / "step.plan").read_text(), edit), match)


def test_random_damage_never_gives_anything_but_a_plan_error(tmp_path: Path, halves: fp.Compiled) -> None:
    text = plan_text(halves.program, halves.plan, halves.update)
    update = text.split("\n", 2)[2].index('"micro_batches"')

    def damage(rng: random.Random, body: list[str]) -> None:
        body[rng.randrange(update, len(body) - 3)] = rng.choice(NOISE)

    assert refusals(tmp_path, text, 60, damage) > 40


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, halves: fp.Compiled) -> None:
    uninterrupted, first, second = (halves.bind(seed=seed) for seed in (3, 3, 99))
    for seed in range(4):
        uninterrupted.step(data_for(halves, seed, (3,)))
    for seed in range(2):
        first.step(data_for(halves, seed, (3,)))
    first.save(tmp_path / "half.safetensors")
    second.load(tmp_path / "half.safetensors")
    for seed in range(2, 4):
        second.step(data_for(halves, seed, (3,)))
    assert same(uninterrupted, second)
    assert second.steps_done == 4
    assert not any("gradient" in name for name in first.stored)


def test_a_checkpoint_is_the_same_with_and_without_accumulation(tmp_path: Path, halves: fp.Compiled) -> None:
    plain = compiled(classifier(batch=4, dropout=0.3), fp.optim.AdamW(1e-2, clip_norm=0.5)).bind(seed=1)
    parts = halves.bind(seed=2)
    parts.step(data_for(halves, 0, (3,)))
    parts.save(tmp_path / "parts.safetensors")
    plain.load(tmp_path / "parts.safetensors")
    assert same(plain, parts) and set(plain.stored) == set(parts.stored)
    examined = fp.compile(classifier(batch=4)).bind(share=parts)
    assert examined.regions[0] is parts.regions[0]


@pytest.mark.parametrize("half", ["_body", "_update"])
def test_an_interrupted_step_leaves_no_gradients_behind(tmp_path: Path, halves: fp.Compiled, half: str) -> None:
    session, other = halves.bind(seed=5), halves.bind(seed=5)
    session.save(tmp_path / "good.safetensors")
    calls = getattr(session, half).bound.calls
    place = len(calls) - 1
    call, left = calls[place], [1 if half == "_body" else 0]

    def interrupted() -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1  # the first micro-batch runs to its end
        call()

    calls[place] = interrupted
    with pytest.raises(KeyboardInterrupt):
        session.step(data_for(halves, 0, (3,)))
    calls[place] = call
    with pytest.raises(fp.SessionError, match="interrupted"):
        session.step(data_for(halves, 0, (3,)))
    session.load(tmp_path / "good.safetensors")
    for seed in range(2):
        data = data_for(halves, seed, (3,))
        assert session.step(data).loss == other.step(data).loss
    assert same(session, other)


def test_trace_times_every_run_of_every_instruction(halves: fp.Compiled) -> None:
    assert halves.update is not None
    data = data_for(halves, 0, (3,))
    result, timings = halves.bind().trace(data)
    assert len(timings) == 3 * len(halves.plan.steps) + len(halves.update.plan.steps)
    assert result.loss == halves.bind().step(data).loss
