"""Which weights a step trains: `train`, `freeze` and `batch_norm`, in numbers, bytes, checkpoints and messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foreplan as fp
from foreplan.base.patterns import Selection
from foreplan.graph import Graph, Kind
from tests.cli.shell import answer, foreplan

MODEL = "mlp:batch=8,width=16,layers=2,inputs=4,classes=3"


def images(batch: int = 4) -> Graph:
    def net(x: fp.Tensor) -> fp.Tensor:
        with fp.nn.scope("stem"):
            y = fp.nn.relu(fp.nn.batch_norm(fp.nn.conv(x, 6, 3, name="conv"), name="bn"))
        with fp.nn.scope("body"):
            y = fp.nn.relu(fp.nn.batch_norm(fp.nn.conv(y, 5, 3, name="conv"), name="bn"))
        return fp.nn.linear(y.mean((2, 3)), 3, name="head")

    return fp.trace(net, fp.spec((batch, 3, 8, 8)))


def batch_of(step: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    made = {}
    for slot in step.program.inputs:
        type = slot.operand.type
        if slot.init is None:
            whole = type.dtype.numpy.kind in "iu"
            made[slot.name] = rng.integers(0, 3, type.shape) if whole else rng.normal(size=type.shape)
    return {name: array.astype(array.dtype if array.dtype.kind == "i" else np.float32) for name, array in made.items()}


def step_of(graph: Graph, **options: Any) -> Any:
    return fp.compile(graph, fp.losses.cross_entropy, fp.optim.Momentum(0.1), **options)


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 1, "precision": "bf16"}], ids=["float32", "bf16"])
def test_frozen_weights_stay_and_all_others_move_as_without(target: str, options: dict[str, Any]) -> None:
    graph = fp.models.build(MODEL)
    names = [value.name for value in graph.parameters]
    frozen = [name for name in names if name.startswith("hidden0")]
    assert frozen and len(frozen) < len(names)
    after = []
    for freeze in ((), ("hidden0",)):
        step = step_of(graph, target=target, freeze=freeze, **options)
        session = step.bind(seed=1)
        before = dict(session.parameters)
        session.step(batch_of(step))
        after.append(dict(session.parameters))
        moved = {name for name in names if (after[-1][name] != before[name]).any()}
        assert moved == set(names) - (set(frozen) if freeze else set())
        assert set(session.parameters) == set(names)
        state = {name for name in session.stored if name.endswith("/velocity")}
        assert state == {f"{name}/velocity" for name in (set(names) - set(frozen) if freeze else names)}
    for name in set(names) - set(frozen):
        np.testing.assert_allclose(after[1][name], after[0][name], rtol=1e-6, atol=1e-7)


def test_freezing_saves_gradients_state_and_what_backward_reads() -> None:
    graph = fp.models.build("resnet18:batch=2,size=64,classes=5")
    whole = step_of(graph, remat="off")
    head = step_of(graph, freeze=["*"], train=["fc"], remat="off")
    trained = head.graph.parameters
    assert [value.name for value in trained] == ["fc.weight", "fc.bias"]
    state = sum(value.type.nbytes for value in head.graph.stored if value.kind is Kind.STATE)
    assert state - 8 == sum(value.type.nbytes for value in trained)
    assert head.arena_bytes < 0.6 * whole.arena_bytes


def test_a_frozen_part_keeps_its_running_statistics_and_uses_them() -> None:
    step = step_of(images(), freeze=["stem"], outputs=["output"])
    session = step.bind(seed=2)
    before = {name: array.copy() for name, array in session.stored.items()}
    inputs = batch_of(step)
    found = session.step(inputs)
    changed = {name for name, array in session.stored.items() if (array != before[name]).any()}
    assert not any(name.startswith("stem.") for name in changed)
    assert {"body.bn.running_mean", "body.bn.running_var"} <= changed
    assert found.loss is not None


def test_batch_norm_frozen_everywhere_gives_in_training_what_inference_gives() -> None:
    step = step_of(images(), batch_norm="frozen", outputs=["output"])
    inference = fp.compile(images()).bind(seed=2)
    session = step.bind(seed=2)
    rng = np.random.default_rng(0)
    for name in session.stored:
        if "running" in name:  # others than those that it starts with
            value = rng.uniform(0.5, 1.5, session.stored[name].shape).astype(np.float32)
            session.stored[name] = inference.stored[name] = value
    inputs = batch_of(step)
    found = session.step(inputs)
    wanted = inference.step({name: array for name, array in inputs.items() if name in ("x",)})
    np.testing.assert_allclose(found.outputs["output"], wanted.outputs["output"], rtol=1e-5, atol=1e-6)
    assert all((session.stored[n] == inference.stored[n]).all() for n in session.stored if "running" in n)


def test_micro_batches_accumulate_no_gradient_of_what_is_frozen() -> None:
    step = step_of(fp.models.build(MODEL), freeze=["hidden0"], accumulate=3)
    sums = {slot.name for slot in step.program.stored if slot.kind is Kind.ACCUMULATOR}
    assert not any("hidden0" in name for name in sums) and any("hidden1" in name for name in sums)


def test_sessions_of_other_choices_share_weights_and_checkpoints(tmp_path: Path) -> None:
    graph = fp.models.build(MODEL)
    trained = step_of(graph, freeze=["hidden0"])
    session = trained.bind(seed=5)
    inference = fp.compile(graph).bind(share=session)
    session.parameters["hidden0.weight"] = np.full_like(session.parameters["hidden0.weight"], 0.25)
    assert (inference.parameters["hidden0.weight"] == 0.25).all()
    session.step(batch_of(trained))
    session.save(tmp_path / "w.safetensors")
    other = step_of(graph).bind(weights=tmp_path / "w.safetensors")
    for name, array in session.parameters.items():
        np.testing.assert_array_equal(other.parameters[name], array)


PARTS = ["encoder.layers.0.weight", "encoder.layers.0.bias", "encoder.layers.1.weight", "head.weight", "/top/scale"]


@pytest.mark.parametrize(
    ("train", "freeze", "expected"),
    [
        ([], ["encoder"], {"head.weight", "/top/scale"}),
        ([], ["encoder.layers.0"], {"encoder.layers.1.weight", "head.weight", "/top/scale"}),
        ([], ["*.bias", "top"], {"encoder.layers.0.weight", "encoder.layers.1.weight", "head.weight"}),
        (["head"], ["*"], {"head.weight"}),
        (["*"], ["head"], set(PARTS) - {"head.weight"}),
        (["encoder.layers.1"], ["encoder"], {"encoder.layers.1.weight", "head.weight", "/top/scale"}),
        (["/top/scale"], ["*"], {"/top/scale"}),
    ],
)
def test_the_more_exact_pattern_counts(train: list[str], freeze: list[str], expected: set[str]) -> None:
    selection = Selection(tuple(train), tuple(freeze))
    found = {name: selection.of(name) for name in PARTS}
    assert {name for name, of in found.items() if of is None or of[0]} == expected


@given(st.lists(st.sampled_from(["a", "b", "a.b", "*", "a.*", "*.b", "a.b.c"]), max_size=4, unique=True), st.data())
def test_a_name_is_trained_or_frozen_by_a_pattern_that_means_it(patterns: list[str], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(patterns)))
    selection = Selection(tuple(patterns[:cut]), tuple(patterns[cut:]))
    for name in ("a", "a.b", "a.b.c", "b", "c.b"):
        try:
            found = selection.of(name)
        except fp.UsageError as error:
            assert "equally exact" in str(error)
            continue
        alone = [p for p in patterns if Selection((p,)).of(name) is not None]
        assert (found is None) == (not alone)
        if found is not None:
            assert found[1] in (selection.train if found[0] else selection.freeze) and found[1] in alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ["hiden0"]}, "no weight of the model is called 'hiden0'; there are 'hidden0'"),
        ({"train": ["fc"]}, "train: no weight of the model is called 'fc'"),
        ({"train": ["hidden0"], "freeze": ["hidden0"]}, "equally exact"),
        ({"freeze": ["*"]}, "depends on no parameter"),
        ({"freeze": "hidden0"}, r"freeze=\['hidden0'\]"),
        ({"batch_norm": "eval"}, "train, sync, frozen"),
    ],
)
def test_what_cannot_be_meant_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fp.ForeplanError, match=message):
        step_of(fp.models.build(MODEL), **options)


def test_statistics_and_integers_are_never_trained() -> None:
    with pytest.raises(fp.UsageError, match="running_mean' cannot be trained"):
        step_of(images(), train=["stem.bn.running_mean"])


def test_commands_take_the_same_patterns(tmp_path: Path) -> None:
    whole, part = (answer("estimate", MODEL, *more) for more in ((), ("--freeze", "hidden0", "--freeze", "hidden1")))
    assert part["persistent_bytes"] < whole["persistent_bytes"]
    assert part["options"]["freeze"] == ["hidden0", "hidden1"]
    path = tmp_path / "step.plan"
    foreplan("plan", MODEL, "--freeze", "hidden0", "-o", path)
    assert answer("estimate", path)["options"]["freeze"] == ["hidden0"]
    assert "no weight" in foreplan("estimate", MODEL, "--freeze", "conv", code=2).stderr
    assert "decided on --freeze" in foreplan("estimate", path, "--freeze", "hidden1", code=2).stderr


def test_estimate_and_train_say_what_is_trained(tmp_path: Path) -> None:
    lines = foreplan("estimate", MODEL, "--freeze", "hidden0").stdout.splitlines()
    trained = 16 * 16 + 16 + 16 * 3 + 3
    assert lines[1] == f"trains 4 tensors, {trained} numbers; 2 frozen"
    assert "trains" not in foreplan("estimate", MODEL, "--infer").stdout
    found = answer("estimate", MODEL, "--freeze", "hidden0", "--parameters")
    assert found["weights"] == {
        "trained": {"tensors": 4, "numbers": trained},
        "frozen": {"tensors": 2, "numbers": 4 * 16 + 16},
    }
    assert [row["name"] for row in found["parameters"] if row["trained"]] == [
        *("hidden1.weight", "hidden1.bias", "out.weight", "out.bias")
    ]
    table = foreplan("estimate", MODEL, "--freeze", "hidden0", "--parameters").stdout.splitlines()
    (row,) = [line.split() for line in table if line.startswith("hidden0.weight ")]
    assert row[2:] == ["frozen", "freeze='hidden0'"]
    arrays = {"x": np.zeros((8, 4), np.float32), "target": np.zeros(8, np.int64)}
    np.savez(tmp_path / "data.npz", **arrays)
    assert foreplan("train", MODEL, "--data", tmp_path / "data.npz").stdout.startswith("trains 6 tensors, ")


def test_a_plan_file_tells_what_it_trains_without_the_reasons(tmp_path: Path) -> None:
    path = tmp_path / "step.plan"
    foreplan("plan", MODEL, "--freeze", "hidden0", "-o", path)
    rows = answer("estimate", path, "--parameters")["parameters"]
    assert [row["trained"] for row in rows] == [False, False, True, True, True, True]
    assert all(row["why"] == "" for row in rows)
