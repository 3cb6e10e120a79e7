"""Sessions on the NumPy engine: one arena, steps that repeat, and what is refused."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph
from foreplan.planner import without_reuse
from foreplan.runtime.session import Session
from tests.profile import pick


def classifier(batch: int = 16, width: int = 24, dropout: float = 0.0) -> Graph:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.relu(fp.nn.conv(x, 4, 3, padding=1, name="conv"))
        x = fp.nn.batch_norm(x, name="norm")
        x = fp.nn.flatten(fp.nn.max_pool(x, 2))
        x = fp.nn.relu(fp.nn.linear(x, width, name="hidden"))
        if dropout:
            x = fp.nn.dropout(x, dropout)
        return fp.nn.linear(x, 3, name="head")

    return fp.trace(model, fp.spec((batch, 1, 6, 6)), name="classifier")


def compiled(graph: Graph | None = None, **options: object) -> fp.Compiled:
    defaults = {"loss": fp.losses.cross_entropy, "optimizer": fp.optim.Nesterov(0.1)}
    return fp.compile(graph or classifier(), **{**defaults, **options})


def batch(seed: int, size: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 3, size)
    x = rng.normal(size=(size, 1, 6, 6)).astype(np.float32)
    x[:, 0, :2, :2] += 2 * target[:, None, None]
    return {"x": x, "target": target}


def test_training_lowers_the_loss() -> None:
    session = compiled().bind()
    losses = [session.step(batch(0)).loss for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]


def test_two_sessions_with_one_seed_agree_and_with_another_do_not() -> None:
    step = compiled()
    first, second, other = (step.bind(seed=seed).step(batch(0)).loss for seed in (1, 1, 2))
    assert first == second != other


def test_resumed_training_equals_uninterrupted_training_bit_for_bit(tmp_path: Path) -> None:
    step = compiled(classifier(dropout=0.3), optimizer=fp.optim.AdamW(1e-2))
    whole = step.bind(seed=3)
    for seed in range(6):
        whole.step(batch(seed))
    first = step.bind(seed=3)
    for seed in range(3):
        first.step(batch(seed))
    first.save(str(tmp_path / "half.safetensors"))
    second = step.bind(seed=99)
    second.load(str(tmp_path / "half.safetensors"))
    for seed in range(3, 6):
        second.step(batch(seed))
    assert set(whole.stored) == set(second.stored)
    for name in whole.stored:
        assert whole.stored[name].tobytes() == second.stored[name].tobytes(), name
    assert whole.steps_done == second.steps_done == 6


def test_evaluation_shares_the_parameters_and_copies_nothing() -> None:
    graph = classifier()
    session = compiled(graph).bind()
    examiner = fp.compile(graph).bind(share=session)
    data = batch(0)
    (before,) = examiner.step({"x": data["x"]}).outputs.values()
    for seed in range(20):
        session.step(batch(seed))
    (after,) = examiner.step({"x": data["x"]}).outputs.values()
    assert examiner.regions[0] is session.regions[0]
    assert examiner.allocated_bytes < 1024
    assert (after.argmax(1) == data["target"]).mean() > (before.argmax(1) == data["target"]).mean()
    # The evaluation in between changes nothing of the training.
    alone = compiled(graph).bind()
    for seed in range(20):
        alone.step(batch(seed))
    for name in alone.stored:
        np.testing.assert_array_equal(alone.stored[name], session.stored[name])


def test_parameters_are_read_and_written_by_name() -> None:
    session = compiled().bind()
    weight = session.parameters["head.weight"]
    session.parameters["head.weight"] = weight * 2
    np.testing.assert_array_equal(session.parameters["head.weight"], weight * 2)
    weight[...] = 7  # a copy: writing to it changes nothing
    assert not (session.parameters["head.weight"] == 7).any()
    with pytest.raises(fp.InputError, match=r"head\.weight"):
        session.parameters["head.weight"] = np.zeros((1, 2), np.float32)
    with pytest.raises(fp.SessionError, match="cannot be deleted"):
        del session.parameters["head.weight"]
    with pytest.raises(fp.SessionError, match="no stored value"):
        session.parameters["new"] = weight


def test_gradients_are_returned_where_there_is_no_optimizer() -> None:
    session = compiled(optimizer=None).bind()
    result = session.step(batch(0))
    assert set(result.gradients) == set(session.parameters)
    before = dict(session.parameters)
    session.step(batch(1))
    assert all((before[name] == session.parameters[name]).all() for name in before)


def test_outputs_that_are_asked_for_are_returned_and_cost_memory() -> None:
    plain, asked = compiled(), compiled(outputs=["output"])
    result = asked.bind().step(batch(0))
    assert result.outputs["output"].shape == (16, 3)
    assert plain.bind().step(batch(0)).outputs == {}
    assert plain.bind().step(batch(0)).loss == result.loss
    assert asked.plan.arena_bytes >= plain.plan.arena_bytes


def test_a_step_allocates_nothing_that_grows_with_the_model() -> None:
    # NumPy's own iterators buffer a few thousand elements; nothing is as large as the tensors, however large those are.
    for size in (64, 1024, 4096):
        session = compiled(classifier(batch=size, width=128)).bind()
        data = batch(0, size)
        session.step(data)
        tracemalloc.start()
        session.step(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 192 * 1024
    assert session.plan.arena_bytes > 40 * peak


@pytest.mark.usefixtures("own_garbage")
def test_early_steps_and_late_ones_use_the_same_bytes() -> None:
    """What foreplan's own lines hold: other threads of the process, such as those that share out tests, go by."""
    own = [tracemalloc.Filter(True, f"{Path(fp.__file__).parent}/*")]
    session = compiled(classifier(batch=2, width=4)).bind()
    data = batch(0, 2)

    def held_after(steps: int) -> int:
        for _ in range(steps):
            session.step(data)
        gc.collect()
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(own).traces)

    session.step(data)
    session.step(data)
    gc.collect()
    tracemalloc.start()
    early = held_after(pick(10, 20, 51))
    late = held_after(pick(20, 50, 947))
    tracemalloc.stop()
    assert early > 0 and late - early < 2048


@pytest.mark.usefixtures("own_garbage")
def test_a_loss_that_is_kept_keeps_nothing_else_alive() -> None:
    session = compiled(outputs=["output"]).bind()
    arena = weakref.ref(session.regions[2])
    result = session.step(batch(0))
    del session
    gc.collect()
    assert arena() is None
    assert result.loss is not None and result.outputs["output"].base is None


def test_poison_changes_no_result() -> None:
    step = compiled(classifier(dropout=0.2), optimizer=fp.optim.Adam(1e-2))
    plain, poisoned = step.bind(seed=5), step.bind(seed=5, poison=True)
    for seed in range(3):
        assert plain.step(batch(seed)).loss == poisoned.step(batch(seed)).loss
    for name in plain.stored:
        assert plain.stored[name].tobytes() == poisoned.stored[name].tobytes()


def test_the_planned_run_equals_the_unplanned_run_bit_for_bit() -> None:
    from foreplan.planner import without_reuse
    from foreplan.runtime.session import Session

    step = compiled(classifier(dropout=0.2))
    planned, apart = step.bind(seed=4), Session(step.program, without_reuse(step.plan, step.program), seed=4)
    assert apart.plan.arena_bytes > planned.plan.arena_bytes
    for seed in range(3):
        assert planned.step(batch(seed)) == apart.step(batch(seed))
    for name in planned.stored:
        assert planned.stored[name].tobytes() == apart.stored[name].tobytes()


def test_what_was_planned_is_what_is_allocated() -> None:
    step = compiled()
    session = step.bind()
    assert session.allocated_bytes == step.plan.arena_bytes == step.memory.arena


def test_trace_times_every_instruction() -> None:
    step = compiled()
    result, timings = step.bind().trace(batch(0))
    assert len(timings) == len(step.plan.steps) and all(t.seconds >= 0 for t in timings)
    assert result.loss == step.bind().step(batch(0)).loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "'x'.* is missing"),
        ({"y": np.zeros(3)}, "there is no input 'y'"),
        ({"targets": np.zeros(16, np.int64)}, "did you mean 'target'"),
        ({"x": np.zeros((16, 1, 6, 5), np.float32)}, r"must have the shape \[16, 1, 6, 6\]"),
        ({"target": np.zeros(16, np.float32)}, "must be int64, and is float32"),
        ({"target": np.array([0] * 15 + [3])}, r"holds 3 at \[15\], and the model takes"),
        ({"x": np.array(["a"])}, "must have the shape"),
        ({"learning_rate": "fast"}, "must be float32"),
    ],
)
def test_wrong_inputs_are_refused_before_anything_changes(change: dict[str, object], message: str) -> None:
    session = compiled().bind()
    before = dict(session.stored)
    data = {name: value for name, value in {**batch(0), **change}.items() if value is not None}
    with pytest.raises(fp.InputError, match=message):
        session.step(data)
    assert all((before[name] == session.stored[name]).all() for name in before)
    session.step(batch(0))


def test_an_interrupted_step_breaks_the_session_until_it_is_loaded(tmp_path: Path) -> None:
    session = compiled().bind()
    session.save(str(tmp_path / "good.safetensors"))
    expected = session.step(batch(0)).loss
    calls = session._body.bound.calls
    call = calls[len(calls) // 2]

    def interrupted() -> None:
        raise KeyboardInterrupt

    calls[len(calls) // 2] = interrupted
    with pytest.raises(KeyboardInterrupt):
        session.step(batch(1))
    calls[len(calls) // 2] = call
    with pytest.raises(fp.SessionError, match="interrupted"):
        session.step(batch(1))
    with pytest.raises(fp.SessionError, match="interrupted"):
        session.save(str(tmp_path / "bad.safetensors"))
    session.load(str(tmp_path / "good.safetensors"))
    assert session.step(batch(0)).loss == expected


def test_checkpoints_of_another_model_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    session = compiled().bind()
    before = dict(session.stored)
    path = tmp_path / "c.safetensors"
    compiled(classifier(width=8)).bind().save(str(path))
    with pytest.raises(fp.SessionError, match="of another model"):
        session.load(str(path))
    session.save(str(path))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(fp.SessionError, match="not a checkpoint"):
        session.load(str(path))
    with pytest.raises(fp.SessionError, match="there is no checkpoint"):
        session.load(str(tmp_path / "missing"))
    assert all((before[name] == session.stored[name]).all() for name in before)


def test_an_inference_session_loads_a_training_checkpoint(tmp_path: Path) -> None:
    graph = classifier()
    session = compiled(graph, optimizer=fp.optim.Adam()).bind()
    session.step(batch(0))
    session.save(str(tmp_path / "c.safetensors"))
    shared = fp.compile(graph).bind(share=session).step({"x": batch(1)["x"]})
    loaded = fp.compile(graph).bind(weights=tmp_path / "c.safetensors").step({"x": batch(1)["x"]})
    np.testing.assert_array_equal(shared.outputs["output"], loaded.outputs["output"])


def test_sessions_of_different_models_cannot_share() -> None:
    session = compiled().bind()
    with pytest.raises(fp.SessionError, match="cannot share"):
        fp.compile(classifier(width=8)).bind(share=session)


def rows(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
    halves = [fp.nn.linear(x, 32, name=name) for name in ("upper", "lower")]
    return fp.nn.linear(fp.nn.relu(np.concatenate(halves)), 4, name="head")


@pytest.mark.parametrize("training", [False, True])
def test_concatenations_in_place_change_no_bit(training: bool) -> None:
    graph = fp.trace(rows, fp.spec((8, 16)))
    step = compiled(graph) if training else fp.compile(graph)
    problem = step.program
    assert any(
        planned.reads[part.read] == planned.writes[part.write] + part.offset
        for planned in step.plan.steps
        for part in problem.actions[planned.action].parts
    )
    apart = Session(problem, without_reuse(step.plan, problem), seed=3)
    sessions = [step.bind(seed=3), step.bind(seed=3, poison=True), apart]
    rng = np.random.default_rng(0)
    data: dict[str, np.ndarray] = {}
    for slot in problem.required_inputs:
        type = slot.operand.type
        data[slot.name] = rng.random(type.shape, np.float32) if type.dtype.is_float else np.zeros(type.shape, np.int64)
    for _ in range(2):
        results = [session.step(data) for session in sessions]
    seen = [{name: array.tobytes() for name, array in result.outputs.items()} for result in results]
    kept = [{name: array.tobytes() for name, array in session.stored.items()} for session in sessions]
    assert seen[0] == seen[1] == seen[2] and kept[0] == kept[1] == kept[2]
    assert results[0].loss == results[1].loss == results[2].loss
