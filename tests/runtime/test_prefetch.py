"""Steps over batches, and plans with a second slot for the next one, on the NumPy engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import InputError, PlanError, SessionError, VerificationError
from foreplan.base.units import align_up
from foreplan.lower.program import STATE
from foreplan.planner import Category, Role
from foreplan.runtime.planfile import save_plan
from tests.cli.shell import answer
from tests.runtime.micro_batches import Arrays, compiled, data_for, perceptron, same


def batches(step: fp.Compiled, count: int, leading: tuple[int, ...] = ()) -> list[Arrays]:
    return [data_for(step, seed, leading) for seed in range(count)]


def second_slots(step: fp.Compiled, alignment: int) -> int:
    """Bytes of the inputs without a default, each aligned."""
    types = [slot.operand.type for slot in step.program.required_inputs]
    return sum(align_up(type.nbytes, alignment) for type in types)


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"optimizer": fp.optim.AdamW(1e-2), "accumulate": 2}])
@pytest.mark.parametrize(("target", "alignment"), [("numpy", 64), ("cuda:h100", 256)])
def test_second_slots_take_the_bytes_of_the_inputs_and_no_more(
    target: str, alignment: int, options: dict[str, object]
) -> None:
    plain, step = (compiled(perceptron(5), target=target, **options, prefetch=prefetch) for prefetch in (False, True))
    assert step.arena_bytes - plain.arena_bytes == second_slots(plain, alignment) > 0
    figures, before = step.estimate(), plain.estimate()
    assert figures["persistent_bytes"] - before["persistent_bytes"] == second_slots(plain, 1)
    assert {slot.name for slot in step.program.ahead} == set(data_for(plain, 0))
    for program in filter(None, (step.program, step.update and step.update.program)):
        for slot in program.ahead:
            value = program.values[slot.operand.value]
            assert (value.region, value.role, value.category) == (STATE, Role.STORED, Category.INPUTS)


def test_a_step_without_inputs_has_no_second_slots() -> None:
    step = fp.compile(fp.trace(lambda: fp.nn.parameter("w", (3,)), name="constant"), prefetch=True)
    assert step.program.ahead == ()
    session = step.bind()
    assert len(list(session.steps([{}, {}]))) == 2


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("poison", [False, True])
def test_steps_give_what_step_gives(prefetch: bool, poison: bool) -> None:
    plain, step = compiled(perceptron(8)), compiled(perceptron(8), prefetch=prefetch)
    ours, theirs = step.bind(seed=1, poison=poison), plain.bind(seed=1)
    given = batches(plain, 5)
    for i, batch in enumerate(given):
        batch["learning_rate"] = np.float32(0.1 / (i + 1))
    wanted = [theirs.step(batch).loss for batch in given]
    assert [result.loss for result in ours.steps(given)] == wanted
    assert same(ours, theirs) and ours.steps_done == 5


@pytest.mark.parametrize("poison", [False, True])
def test_micro_batches_go_through_the_second_slots(poison: bool) -> None:
    graph = perceptron(4)
    (name,) = graph.outputs
    plain, step = (compiled(graph, accumulate=3, outputs=[name], prefetch=prefetch) for prefetch in (False, True))
    ours, theirs = step.bind(seed=1, poison=poison), plain.bind(seed=1)
    given = batches(plain, 4, (3,))
    wanted = [theirs.step(batch) for batch in given]
    found = [*ours.steps(given[:2]), *(ours.step(batch) for batch in given[2:])]
    assert [result.loss for result in found] == [result.loss for result in wanted]
    for ours_given, theirs_given in zip(found, wanted):
        np.testing.assert_array_equal(ours_given.outputs[name], theirs_given.outputs[name])
    assert same(ours, theirs)


def test_a_generator_may_use_its_arrays_again() -> None:
    step = compiled(perceptron(8))
    given = batches(step, 4)

    def one_after_the_other() -> Iterator[Arrays]:
        arrays = {name: np.empty_like(array) for name, array in given[0].items()}
        for batch in given:
            for name, array in batch.items():
                arrays[name][...] = array
            yield arrays

    ours, theirs = step.bind(), step.bind()
    assert [r.loss for r in ours.steps(one_after_the_other())] == [theirs.step(batch).loss for batch in given]


def test_a_batch_is_taken_while_the_step_before_runs_and_sees_it_done() -> None:
    step = compiled(perceptron(8), prefetch=True)
    session, seen = step.bind(), []

    def taken() -> Iterator[Arrays]:
        for batch in batches(step, 3):
            seen.append(("taken", session.steps_done))
            yield batch

    for _ in session.steps(taken()):
        seen.append(("given", session.steps_done))
    assert seen == [("taken", 0), ("taken", 1), ("given", 1), ("taken", 2), ("given", 2), ("given", 3)]


def wrong(step: fp.Compiled) -> Arrays:
    return {name: array[1:] if array.ndim > 1 else array for name, array in data_for(step, 0).items()}


def failing(step: fp.Compiled) -> Iterator[Arrays]:
    yield from batches(step, 2)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("prefetch", [False, True])
def test_errors_come_behind_the_results_before_and_change_nothing(prefetch: bool) -> None:
    step = compiled(perceptron(8), prefetch=prefetch)
    for given, error, said in (
        ([*batches(step, 2), wrong(step), data_for(step, 2)], InputError, "must have the shape"),
        (failing(step), OSError, "the disk is gone"),
        ([*batches(step, 2), "x"], InputError, "arrays by name.*got str"),
    ):
        ours, theirs = step.bind(), step.bind()
        results = ours.steps(given)  # type: ignore[arg-type]
        wanted = [theirs.step(batch).loss for batch in batches(step, 2)]
        assert [next(results).loss for _ in range(2)] == wanted
        with pytest.raises(error, match=said):
            next(results)
        assert same(ours, theirs)
        assert ours.step(data_for(step, 2)).loss == theirs.step(data_for(step, 2)).loss


def test_what_are_no_batches_is_told_at_once() -> None:
    step = compiled(perceptron(8))
    for given in (data_for(step, 0), None, 3):
        with pytest.raises(InputError, match="batches one after the other"):
            step.bind().steps(given)  # type: ignore[arg-type]
    assert list(step.bind().steps([])) == []


def test_batches_cannot_run_a_step_of_the_session_that_they_are_for() -> None:
    step = compiled(perceptron(8))
    for how in ("step", "steps", "trace"):
        ours, theirs = step.bind(), step.bind()

        def taken(session: fp.runtime.session.Session = ours, how: str = how) -> Iterator[Arrays]:
            yield data_for(step, 0)
            made = getattr(session, how)([data_for(step, 1)] if how == "steps" else data_for(step, 1))
            yield from made if how == "steps" else ()

        results = ours.steps(taken())
        assert next(results).loss == theirs.step(data_for(step, 0)).loss
        with pytest.raises(SessionError, match="cannot run another one"):
            next(results)
        assert ours.step(data_for(step, 1)).loss == theirs.step(data_for(step, 1)).loss


def test_a_loop_that_is_left_and_steps_in_between_disturb_nothing(tmp_path: Path) -> None:
    step = compiled(perceptron(8), prefetch=True)
    ours, theirs = step.bind(), step.bind()
    given = batches(step, 8)
    first = ours.steps(given[:5])
    found = [next(first).loss, ours.step(given[5]).loss, next(first).loss]
    second = ours.steps(given[6:])  # writes its batch where the first has its next one
    found += [next(second).loss, next(first).loss, next(second).loss]
    ours.save(tmp_path / "saved.safetensors")
    order = [given[i] for i in (0, 5, 1, 6, 2, 7)]
    assert found == [theirs.step(batch).loss for batch in order]
    theirs.load(tmp_path / "saved.safetensors")
    assert same(ours, theirs) and not any("ahead" in name for name in ours.stored)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_plan_files_hold_second_slots(tmp_path: Path, options: dict[str, object]) -> None:
    step = compiled(perceptron(8), **options, prefetch=True)
    step.save(tmp_path / "step.plan")
    read = fp.load_plan(tmp_path / "step.plan")
    assert read.program.ahead == step.program.ahead and read.arena_bytes == step.arena_bytes
    given = batches(step, 3, (2,) if options else ())
    ours, theirs = read.bind(), step.bind()
    assert [r.loss for r in ours.steps(given)] == [theirs.step(batch).loss for batch in given]


def test_plans_whose_second_slots_are_none_are_refused(tmp_path: Path) -> None:
    step = compiled(perceptron(8), prefetch=True)
    program, (x, target) = step.program, step.program.ahead
    stored = program.stored[0]
    for ahead, said in (
        ((replace(x, operand=stored.operand), target), "no bytes of its own"),
        (
            (replace(x, operand=replace(x.operand, value=program.inputs[0].operand.value)), target),
            "no bytes of its own",
        ),
        ((x, replace(target, operand=x.operand)), "no bytes of its own|no such input"),
        ((replace(x, name="y"), target), "no such input"),
    ):
        save_plan(str(tmp_path / "edited.plan"), replace(program, ahead=ahead), step.plan)
        with pytest.raises(PlanError, match=said):
            fp.load_plan(tmp_path / "edited.plan")


def test_halves_that_keep_the_next_batch_in_different_bytes_are_refused() -> None:
    step, other = (compiled(perceptron(8), accumulate=2, prefetch=prefetch) for prefetch in (True, False))
    assert step.update is not None and other.update is not None
    update = replace(step.update, program=replace(step.update.program, ahead=()))
    with pytest.raises(VerificationError, match="next batch in the same bytes"):
        replace(step, update=update).bind()
    with pytest.raises(VerificationError, match="next batch in the same bytes"):
        replace(step, update=other.update).bind()


def test_the_command_line_plans_them(tmp_path: Path) -> None:
    model, path = "mlp:width=16,layers=2,inputs=12,classes=5,batch=8", str(tmp_path / "x.plan")
    plain, ahead = answer("estimate", model), answer("estimate", model, "--prefetch")
    wanted = 8 * 12 * 4 + 64  # float32 images; eight int64 labels
    assert ahead["arena_bytes"] - plain["arena_bytes"] == wanted
    assert answer("plan", model, "--prefetch", "-o", path)["arena_bytes"] == ahead["arena_bytes"]
    assert answer("verify", path)["persistent_bytes"] == ahead["persistent_bytes"]


def test_training_from_the_command_line_is_the_same_with_them(tmp_path: Path) -> None:
    data = {"x": np.random.default_rng(0).normal(size=(40, 12)).astype(np.float32), "target": np.arange(40) % 5}
    np.savez(tmp_path / "data.npz", **data)
    model = "mlp:width=16,layers=2,inputs=12,classes=5,batch=8"
    for more in ((), ("--accumulate", 2)):
        told = [
            answer("train", model, "--data", tmp_path / "data.npz", "--epochs", 2, "--lr", 0.1, *more, *prefetch)
            for prefetch in ((), ("--prefetch",))
        ]
        assert told[0]["losses"] == told[1]["losses"] and told[0]["steps"] == (4 if more else 10)
