"""The CUDA engine on a card that is not there: launches run on the CPU, and all else is the engine's own."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import PlanError, TargetError
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.launch import Multiply
from foreplan.runtime.cuda.libraries import driver
from tests.cpu.test_engine import farthest
from tests.gpu.card import FakeCard
from tests.gpu.compiled import needs_gcc
from tests.runtime.micro_batches import compiled, data_for, perceptron, same

pytestmark = needs_gcc
TARGET = "cuda:h100"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    made = FakeCard()
    monkeypatch.setattr(driver, "card", lambda: made)
    return made


def step_for(target: str, **options: object) -> fp.Compiled:
    return compiled(perceptron(8), fp.optim.Adam(1e-2), target=target, **options)


def test_steps_give_what_numpy_gives_however_they_run(card: FakeCard) -> None:
    reference, step = step_for("numpy"), step_for(TARGET)
    theirs = reference.bind(seed=1)
    start = dict(theirs.stored)
    ours = [step.bind(seed=1), step.bind(seed=1, capture=False), step.bind(seed=1, poison=True)]
    assert all((start[name] == session.stored[name]).all() for session in ours for name in start)
    for seed in range(4):
        data = data_for(reference, seed)
        wanted = theirs.step(data).loss
        found = [session.step(data).loss for session in ours]
        assert wanted is not None and found[0] == pytest.approx(wanted, rel=1e-4)
        assert found[1:] == found[:1] * 2
    assert farthest(ours[0], theirs, start) <= 1e-3
    assert same(ours[0], ours[1]) and same(ours[0], ours[2])
    assert ours[0].steps_done == 4


def test_a_step_is_captured_once_and_replayed(card: FakeCard) -> None:
    step = step_for(TARGET)
    session, data = step.bind(), data_for(step, 0)
    card.done.clear()
    for _ in range(5):
        session.step(data)
    assert card.done == ["capture", *["replay"] * 4]
    plain = step.bind(capture=False)
    card.done.clear()
    plain.step(data)
    plain.step(data)
    assert card.done == []


def test_the_learning_rate_is_read_at_every_step(card: FakeCard) -> None:
    reference, step = step_for("numpy"), step_for(TARGET)
    ours, theirs = step.bind(seed=1), reference.bind(seed=1)
    start, data = dict(theirs.stored), data_for(reference, 0)
    for rate in (1e-2, 0.0, 3e-2):
        before = dict(ours.parameters)
        for session in (ours, theirs):
            session.step(data | {"learning_rate": np.float32(rate)})
        assert all((before[name] == ours.parameters[name]).all() for name in before) == (rate == 0)
    assert farthest(ours, theirs, start) <= 1e-3


@pytest.mark.usefixtures("own_garbage")
def test_one_arena_is_allocated_and_freed_with_the_session(card: FakeCard) -> None:
    step = step_for(TARGET)
    gc.collect()
    before, card.done[:] = card.live, []
    session = step.bind()
    assert card.done.count("allocate") == 1
    assert card.live - before == session.allocated_bytes == step.arena_bytes
    session.step(data_for(step, 0))
    assert card.live - before == step.arena_bytes
    del session
    gc.collect()
    assert card.live == before


def test_outputs_are_copies(card: FakeCard) -> None:
    graph = perceptron(8)
    inference = [fp.compile(graph, target=target).bind(seed=2) for target in ("numpy", TARGET)]
    rng = np.random.default_rng(0)
    (slot,) = inference[0].program.inputs
    first, second = (rng.standard_normal(slot.operand.type.shape).astype(np.float32) for _ in range(2))
    (name,) = (output.name for output in inference[0].program.outputs)
    found = inference[1].step({slot.name: first}).outputs[name]
    kept = found.copy()
    inference[1].step({slot.name: second})
    np.testing.assert_array_equal(found, kept)
    np.testing.assert_allclose(found, inference[0].step({slot.name: first}).outputs[name], rtol=1e-4, atol=1e-5)


def test_gradients_and_fortran_order_and_other_types(card: FakeCard) -> None:
    graph = perceptron(8)
    both = [fp.compile(graph, fp.losses.cross_entropy, target=target).bind(seed=2) for target in ("numpy", TARGET)]
    data = data_for(fp.compile(graph, fp.losses.cross_entropy), 0)
    other = {name: np.asfortranarray(x.astype(np.float64) if x.dtype == np.float32 else x) for name, x in data.items()}
    wanted, found = both[0].step(data), both[1].step(other)
    assert set(found.gradients) == set(wanted.gradients) and len(wanted.gradients) > 2
    for name, gradient in wanted.gradients.items():
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("poison", [False, True])
def test_micro_batches(card: FakeCard, poison: bool) -> None:
    both = [compiled(perceptron(4), fp.optim.AdamW(1e-2), accumulate=3, target=t) for t in ("numpy", TARGET)]
    theirs, ours = both[0].bind(seed=1), both[1].bind(seed=1, poison=poison)
    start = dict(theirs.stored)
    for seed in range(3):
        data = data_for(both[0], seed, (3,))
        assert ours.step(data).loss == pytest.approx(theirs.step(data).loss, rel=1e-4)
    assert farthest(ours, theirs, start) <= 1e-3


def test_checkpoints_go_from_a_card_to_another_engine_and_back(card: FakeCard, tmp_path: Path) -> None:
    step = step_for(TARGET)
    session, resumed, data = step.bind(seed=1), step.bind(seed=2), data_for(step, 0)
    session.step(data)
    session.save(tmp_path / "card.safetensors")
    resumed.load(tmp_path / "card.safetensors")
    assert same(session, resumed)
    assert session.step(data).loss == resumed.step(data).loss
    host = step_for("numpy").bind(weights=tmp_path / "card.safetensors")
    host.save(tmp_path / "host.safetensors")
    other = step.bind(weights=tmp_path / "host.safetensors", seed=3)
    resumed.load(tmp_path / "card.safetensors")
    assert all((other.parameters[name] == resumed.parameters[name]).all() for name in other.parameters)


def test_sessions_share_parameters(card: FakeCard) -> None:
    graph = perceptron(8)
    step = step_for(TARGET)
    trained = step.bind(seed=1)
    examiner = fp.compile(graph, target=TARGET).bind(share=trained)
    data = data_for(step, 0)
    inputs = {slot.name: data[slot.name] for slot in examiner.program.inputs}
    trained.step(data)
    (found,) = examiner.step(inputs).outputs.values()
    host = fp.compile(graph).bind()
    for name in host.parameters:
        host.parameters[name] = trained.parameters[name]
    (wanted,) = host.step(inputs).outputs.values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert examiner.allocated_bytes < trained.allocated_bytes
    with pytest.raises(fp.SessionError, match="cannot share"):
        fp.compile(graph).bind(share=trained)


def test_a_trace_times_every_instruction(card: FakeCard) -> None:
    step = step_for(TARGET)
    session = step.bind()
    session.step(data_for(step, 0))
    card.launched.clear()
    session.trace(data_for(step, 0))
    assert card.launched[0] == "hold" and card.launched.count("hold") == len(step.plan.steps)  # while calls are queued
    result, timings = step.bind().trace(data_for(step, 0))
    assert len(timings) == len(step.plan.steps) and all(timing.seconds > 0 for timing in timings)
    assert result.loss == step.bind().step(data_for(step, 0)).loss


def test_a_failure_in_a_step_breaks_the_session_until_it_is_loaded(card: FakeCard, tmp_path: Path) -> None:
    step = step_for(TARGET)
    session, data = step.bind(seed=1), data_for(step, 0)
    session.step(data)
    session.save(tmp_path / "saved.safetensors")
    wanted = session.step(data).loss
    card.fail_after = 3
    with pytest.raises(fp.SessionError, match=r"ILLEGAL_ADDRESS(.|\n)*load the last checkpoint"):
        session.step(data)
    card.fail_after = None
    card.queue.clear()
    with pytest.raises(fp.SessionError, match="load the last checkpoint"):
        session.step(data)
    with pytest.raises(fp.SessionError, match="load the last checkpoint"):
        session.save(tmp_path / "broken.safetensors")
    assert not (tmp_path / "broken.safetensors").exists()
    session.load(tmp_path / "saved.safetensors")
    assert session.step(data).loss == wanted


def test_less_memory_than_the_arena_takes(card: FakeCard) -> None:
    step = step_for(TARGET)
    card.total = card.live + step.arena_bytes - 1
    with pytest.raises(fp.DoesNotFitError, match=r"the arena takes .* of fake H100 .* are free.*nvidia-smi"):
        step.bind()
    card.total += 1
    step.bind()


def test_a_product_that_cublaslt_cannot_do_is_told_with_its_node(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(product: Multiply, places: tuple[int, int, int, int], workspace: int) -> None:
        raise PlanError(f"cannot multiply {product}")

    monkeypatch.setattr(card, "multiplying", refuse)
    with pytest.raises(PlanError, match=r"node '.*matmul': cannot multiply \d+ x 8 x \d+, float32 to float32"):
        step_for(TARGET).bind()


def test_another_card_than_planned_for(card: FakeCard) -> None:
    with pytest.raises(TargetError, match=r"planned for .*A100.*8\.0.*fake H100, of 9\.0.*compile it for"):
        step_for("cuda:a100").bind()
    assert device_named("h200").capability == "9.0"
    step_for("cuda:h200").bind()


def test_threads_are_not_the_cards(card: FakeCard) -> None:
    with pytest.raises(fp.UsageError, match="threads"):
        step_for(TARGET).bind(threads=2)


def test_plans_from_files_run(card: FakeCard, tmp_path: Path) -> None:
    step = step_for(TARGET)
    step.save(tmp_path / "step.plan")
    data = data_for(step, 0)
    assert fp.load_plan(tmp_path / "step.plan").bind(seed=1).step(data).loss == step.bind(seed=1).step(data).loss


def test_the_order_of_threads_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_for(TARGET)
    data, sessions = data_for(step, 0), []
    for reverse in (False, True):
        made = FakeCard(reverse)
        monkeypatch.setattr(driver, "card", lambda made=made: made)
        sessions.append(step.bind(seed=1))
        sessions[-1].step(data)
    assert same(*sessions)


def test_activations_are_copied_to_pinned_memory_and_back(card: FakeCard) -> None:
    graph = fp.models.build("mlp:batch=1024,width=32,layers=6,inputs=12,classes=5")
    plain = compiled(graph, target=TARGET, remat="off")
    step = compiled(graph, target=TARGET, remat="off", offload=True, budget=0.8)
    assert step.host_bytes > 0
    data, sessions = data_for(step, 0), [plain.bind(seed=1), step.bind(seed=1), step.bind(seed=1, poison=True)]
    for _ in range(3):
        first, *others = (session.step(data).loss for session in sessions)
        assert others == [first, first]
    assert same(*sessions[:2]) and same(*sessions[1:])
