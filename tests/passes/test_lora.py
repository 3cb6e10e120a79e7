"""Adapters of low rank: what they compute and how they train, beside JAX with the adapted weights written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, Kind
from foreplan.graph.text import parse_graph
from tests.profile import pick

RATE = 0.05
ENGINES = ["numpy", "cpu:threads=1"]


def mixed(ids: fp.Tensor) -> dict[str, fp.Tensor]:
    """Each way to read a weight: a table that is the head, too; [out, in], [in, out], a convolution, a second table."""
    small = fp.graph.Normal(0.3)
    y = fp.nn.embedding(ids, 9, 6, "wte", small) + fp.nn.embedding(ids, 9, 6, "second", small)
    with fp.nn.scope("body"):
        y = np.tanh(fp.nn.linear(y, 8, name="up"))
        y = np.tanh(y @ fp.nn.parameter("down.weight", (8, 6), fp.graph.Normal(0.4)))
    z = fp.nn.conv(np.swapaxes(y, 1, 2), 6, 3, padding=1, name="conv")
    y = y + np.swapaxes(z, 1, 2)
    return {"logits": y @ fp.nn.shared("wte.weight").T}


MIXED = ["wte", "second", "body", "conv"]


def graph_of(batch: int = 2) -> Graph:
    return fp.trace(mixed, fp.spec((batch, 5), "int64"))


def effective(w: dict[str, Any], scale: float) -> dict[str, Any]:
    """The adapted weights by the paper's formula."""
    a, b = {}, {}
    for name, array in w.items():
        module, _, rest = name.partition(".lora_")
        (a if "A" in rest else b)[module] = array
    found = dict(w)
    for module in ("wte", "body.up"):
        found[f"{module}.weight"] = w[f"{module}.weight"] + scale * b[module] @ a[module]
    for module in ("second", "body.down"):
        found[f"{module}.weight"] = w[f"{module}.weight"] + scale * (b[module] @ a[module]).T
    taps = jnp.einsum("orz,rit->oit", b["conv"], a["conv"])
    return found | {"conv.weight": w["conv.weight"] + scale * taps}


def logits(w: dict[str, Any], ids: Any) -> Any:
    """The same model in JAX."""
    y = w["wte.weight"][ids] + w["second.weight"][ids]
    y = jnp.tanh(y @ w["body.up.weight"].T + w["body.up.bias"])
    y = jnp.tanh(y @ w["body.down.weight"])
    z = jax.lax.conv(jnp.pad(y.swapaxes(1, 2), ((0, 0), (0, 0), (1, 1))), w["conv.weight"], (1,), "VALID")
    y = y + (z + w["conv.bias"][:, None]).swapaxes(1, 2)
    return y @ w["wte.weight"].T


def test_steps_are_those_of_the_adapted_weights_written_out() -> None:
    rng = np.random.default_rng(0)
    rank, alpha = int(rng.integers(1, 5)), float(rng.uniform(1, 4))
    adapted = fp.lora(graph_of(), rank, alpha, MIXED)
    sessions = [
        fp.compile(adapted, fp.losses.cross_entropy, fp.optim.SGD(RATE), target=engine).bind() for engine in ENGINES
    ]
    w = {name: jnp.asarray(array) for name, array in sessions[0].parameters.items()}
    trained = {name: array for name, array in w.items() if ".lora_" in name}
    assert set(trained) == {value.name for value in adapted.parameters} and len(trained) == 2 * 5

    def loss(adapters: dict[str, Any], ids: Any, target: Any) -> Any:
        y = logits(effective(w | adapters, alpha / rank), ids)
        return -jnp.take_along_axis(jax.nn.log_softmax(y), target[..., None], -1).mean()

    step = jax.jit(jax.value_and_grad(loss))
    for _ in range(pick(3, 4, 8)):
        ids, target = rng.integers(0, 9, (2, 5)), rng.integers(0, 9, (2, 5))
        wanted, gradients = step(trained, ids, target)
        for session in sessions:
            found = session.step({"ids": ids, "target": target}).loss
            assert found == pytest.approx(float(wanted), rel=1e-4) and found < 9
        trained = {name: array - RATE * gradients[name] for name, array in trained.items()}
    for session in sessions:
        for name, array in trained.items():
            np.testing.assert_allclose(session.parameters[name], array, rtol=2e-3, atol=2e-5, err_msg=name)
        merged = session.state_dict(merged=True)
        assert set(merged) == {value.name for value in graph_of().stored}
        for name, array in effective({**w, **trained}, alpha / rank).items():
            if ".lora_" not in name:
                np.testing.assert_allclose(merged[name], array, rtol=1e-3, atol=2e-5, err_msg=name)


def test_a_model_with_adapters_begins_as_it_was_and_merges_into_itself() -> None:
    base, adapted = graph_of(), fp.lora(graph_of(), 3, 5, MIXED)
    ids = np.random.default_rng(1).integers(0, 9, (2, 5))
    session, plain = fp.compile(adapted).bind(seed=2), fp.compile(base).bind(seed=2)
    (before,), (wanted,) = (s.step({"ids": ids}).outputs.values() for s in (session, plain))
    np.testing.assert_allclose(before, wanted, rtol=1e-6, atol=1e-7)
    rng = np.random.default_rng(3)
    for value in adapted.parameters:
        session.parameters[value.name] = rng.normal(size=value.shape).astype(np.float32)
    for name, array in session.state_dict(merged=True).items():
        plain.stored[name] = array
    (after,), (wanted,) = (s.step({"ids": ids}).outputs.values() for s in (session, plain))
    assert abs(after - before).max() > 0.1
    np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-4)


NORMED = ["second", "body", "conv"]  # but for the table that is the head, too


def with_magnitudes(w: dict[str, Any], scale: float) -> dict[str, Any]:
    """DoRA's adapted weights by the paper's equation 5."""
    found = w | effective({name: array for name, array in w.items() if "magnitude" not in name}, scale)
    for module, axes in (("second", (0,)), ("body.down", (0,)), ("body.up", (1,)), ("conv", (1, 2))):
        v, m = found[f"{module}.weight"], w[f"{module}.lora_magnitude_vector"]
        m = m.reshape(-1, 1, 1) if module == "conv" else m[:, None] if module == "body.up" else m
        norm = jax.lax.stop_gradient(jnp.sqrt((v * v).sum(axes, keepdims=True)))
        found[f"{module}.weight"] = m * v / norm
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_with_magnitudes_are_those_of_the_formula_written_out(engine: str) -> None:
    rng = np.random.default_rng(4)
    base = fp.lora(graph_of(), 3, 4, NORMED, dora=True)
    session = fp.compile(base, fp.losses.cross_entropy, fp.optim.SGD(RATE), target=engine).bind(seed=1)
    w = {name: jnp.asarray(array) for name, array in session.parameters.items()}
    zero = {f"wte.lora_{end}": jnp.zeros(shape) for end, shape in (("A.weight", (1, 6)), ("B.weight", (9, 1)))}
    trained = {name: array for name, array in w.items() if ".lora_" in name}
    assert len(trained) == 3 * 4

    def loss(adapters: dict[str, Any], ids: Any, target: Any) -> Any:
        y = logits(with_magnitudes(zero | w | adapters, 4 / 3), ids)
        return -jnp.take_along_axis(jax.nn.log_softmax(y), target[..., None], -1).mean()

    step = jax.jit(jax.value_and_grad(loss))
    for _ in range(pick(3, 4, 8)):
        ids, target = rng.integers(0, 9, (2, 5)), rng.integers(0, 9, (2, 5))
        wanted, gradients = step(trained, ids, target)
        found = session.step({"ids": ids, "target": target}).loss
        assert found == pytest.approx(float(wanted), rel=1e-4)
        trained = {name: array - RATE * gradients[name] for name, array in trained.items()}
    for name, array in trained.items():
        np.testing.assert_allclose(session.parameters[name], array, rtol=2e-3, atol=2e-5, err_msg=name)
    merged = session.state_dict(merged=True)
    for name, array in with_magnitudes(zero | w | trained, 4 / 3).items():
        if ".lora_" not in name:
            np.testing.assert_allclose(merged[name], array, rtol=1e-3, atol=2e-5, err_msg=name)


def test_the_gradient_of_magnitudes_keeps_one_sum_for_each_product() -> None:
    """And not the weight's result and the adapter's: only the product that adds them reads the former."""
    step = fp.compile(fp.lora(graph_of(), 2, 4, NORMED, dora=True), fp.losses.cross_entropy, fp.optim.SGD(RATE))
    alone = [value for value in step.graph.producer if value.name.rpartition("/")[2] == "alone"]
    assert len(alone) == 4
    assert all([len(node.inputs) for node in step.graph.readers[value]] == [3] for value in alone)


def test_a_part_of_a_weight_that_is_zero_stays_zero_and_all_is_finite() -> None:
    base = fp.trace(lambda x: fp.nn.linear(x, 3, bias=False, weight_init=0.0, name="fc"), fp.spec((2, 4)))
    session = fp.compile(fp.lora(base, 2, 4, ["fc"], dora=True), fp.losses.mean, fp.optim.SGD(0.1)).bind()
    for _ in range(2):
        session.step({"x": np.ones((2, 4), np.float32)})
    assert all(np.isfinite(array).all() for array in session.parameters.values())
    assert (session.state_dict(merged=True)["fc.weight"] == 0).all()


def test_only_adapters_have_gradients_and_state() -> None:
    step = fp.compile(fp.lora(graph_of(), 2, 4, MIXED), fp.losses.cross_entropy, fp.optim.AdamW(1e-3))
    kinds = {value.name: value.kind for value in step.graph.stored}
    assert {name for name, kind in kinds.items() if kind is Kind.PARAMETER} == {n for n in kinds if n.endswith(ENDS)}
    state = {name.rpartition("/")[0] for name, kind in kinds.items() if kind is Kind.STATE and "/" in name}
    assert state == {name for name, kind in kinds.items() if kind is Kind.PARAMETER}
    assert "trains 10 tensors" in step.weights.line


ENDS = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")


def modules(graph: Graph) -> list[str]:
    return sorted({value.name.partition(".lora_")[0] for value in graph.parameters if ".lora_" in value.name})


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, ["body.down", "body.up"]),
        (["body"], ["body.down", "body.up"]),
        (["*.up"], ["body.up"]),
        (["*.up.weight", "conv"], ["body.up", "conv"]),
        (["*"], ["body.down", "body.up", "conv", "second", "wte"]),
    ],
)
def test_patterns_name_weights_as_elsewhere(targets: list[str] | None, expected: list[str]) -> None:
    assert modules(fp.lora(graph_of(), targets=targets)) == expected


def test_heads_are_left_out_where_nothing_is_said() -> None:
    def net(x: fp.Tensor) -> dict[str, fp.Tensor]:
        y = fp.nn.linear(fp.nn.relu(fp.nn.linear(x, 4, name="first")), 4, name="second")
        return {"y": fp.nn.softmax(fp.nn.linear(y, 3, name="head"))}

    assert modules(fp.lora(fp.trace(net, fp.spec((2, 3))))) == ["first", "second"]


def test_an_onnx_files_weights_behind_a_transpose_have_adapters(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weight = rng.normal(size=(4, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["fc.weight"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned"], ["y"]),
        helper.make_node("Tanh", ["y"], ["z"]),
    ]
    x, z = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, k]) for n, k in (("x", 3), ("z", 4)))
    made = helper.make_graph(nodes, "g", [x], [z], [numpy_helper.from_array(weight, "fc.weight")])
    onnx.save(helper.make_model(made), tmp_path / "m.onnx")
    adapted = fp.lora(fp.from_onnx(tmp_path / "m.onnx"), 2, 6, ["fc"])
    session = fp.compile(adapted).bind()
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3), (4, 2)))
    session.parameters["fc.lora_A.weight"], session.parameters["fc.lora_B.weight"] = a, b
    data = rng.normal(size=(2, 3)).astype(np.float32)
    (found,) = session.step({"x": data}).outputs.values()
    np.testing.assert_allclose(found, np.tanh(data @ (weight + 3 * b @ a).T), rtol=1e-4, atol=1e-6)


def test_dropout_drops_the_adapters_inputs_in_training_alone() -> None:
    base = fp.trace(lambda x: fp.nn.linear(x, 64, bias=False, weight_init=0.0, name="fc"), fp.spec((4, 64)))
    graph = fp.lora(base, 64, 64, ["fc"], dropout=0.25)
    inference = fp.compile(graph).bind()
    training = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.0), outputs=["output"]).bind()
    x = np.random.default_rng(0).uniform(1, 2, (4, 64)).astype(np.float32)
    for session in (inference, training):
        for part in "AB":
            session.parameters[f"fc.lora_{part}.weight"] = np.eye(64, dtype=np.float32)
    np.testing.assert_allclose(inference.step({"x": x}).outputs["output"], x, rtol=1e-6)
    found = training.step({"x": x}).outputs["output"]
    dropped = found == 0
    assert 0.1 < dropped.mean() < 0.4
    np.testing.assert_allclose(found[~dropped], (x / 0.75)[~dropped], rtol=1e-5)


def test_an_adapted_model_is_called_in_a_larger_one_with_its_adapters() -> None:
    adapted = fp.lora(graph_of(), 2, 8, ["body"])
    whole = fp.trace(lambda ids: adapted(ids, name="left") - adapted(ids, name="right"), fp.spec((2, 5), "int64"))
    assert modules(whole) == [f"{side}.body.{part}" for side in ("left", "right") for part in ("down", "up")]
    session = fp.compile(whole).bind()
    b, a = (session.parameters[f"left.body.up.lora_{part}.weight"] for part in "BA")
    b += 1
    session.parameters["left.body.up.lora_B.weight"] = b
    merged = session.state_dict(merged=True)
    wanted = session.parameters["left.body.up.weight"] + 4 * b @ a
    np.testing.assert_allclose(merged["left.body.up.weight"], wanted, rtol=1e-5)
    np.testing.assert_array_equal(merged["right.body.up.weight"], session.parameters["right.body.up.weight"])


def test_adapters_of_several_ranks_stand_side_by_side_and_a_head_is_trained_with_them() -> None:
    graph = fp.lora(fp.lora(graph_of(), 2, 8, ["*.up"]), 5, 5, ["*.down"])
    shapes = {value.name: value.shape for value in graph.parameters}
    assert shapes["body.up.lora_A.weight"] == (2, 6) and shapes["body.down.lora_A.weight"] == (5, 8)
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), train=["conv"])
    assert {value.name for value in step.graph.parameters} == {*shapes, "conv.weight", "conv.bias"}


def test_bfloat16_weights_stay_so_and_their_adapters_are_trained_in_float32() -> None:
    base = fp.trace(lambda x: np.tanh(fp.nn.linear(x, 4, name="fc")), fp.spec((2, 3), "bfloat16"))
    step = fp.compile(fp.lora(base, 2, 4, ["fc"]), fp.losses.mean, fp.optim.SGD(0.1))
    types = {value.name: value.dtype.name for value in step.graph.stored}
    assert types["fc.weight"] == "bfloat16" and types["fc.lora_A.weight"] == types["fc.lora_B.weight"] == "float32"
    session = step.bind()
    data = (
        np.random.default_rng(0)
        .normal(size=(2, 3))
        .astype(np.dtype(session.program.inputs[0].operand.type.dtype.numpy))
    )
    session.step({"x": data})
    assert (session.parameters["fc.lora_B.weight"] != 0).any()
    assert session.state_dict(merged=True)["fc.weight"].dtype == session.parameters["fc.weight"].dtype


def test_text_and_plan_files_keep_what_adapters_are(tmp_path: Path) -> None:
    graph = fp.lora(graph_of(), 2, 5, ["*.down", "second"])
    graph = fp.lora(graph, 2, 5, ["*.up"], dora=True)
    assert parse_graph(graph.as_text()).as_text() == graph.as_text()
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.5))
    step.save(tmp_path / "step.plan")
    sessions = step.bind(seed=1), fp.load_plan(tmp_path / "step.plan").bind(seed=1)
    ids = np.arange(10).reshape(2, 5) % 9
    for session in sessions:
        session.step({"ids": ids, "target": ids})
    states = [session.state_dict(merged=True) for session in sessions]
    assert states[0].keys() == states[1].keys() == {value.name for value in graph_of().stored}
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name])


def test_the_model_without_adapters_is_evaluated_in_place() -> None:
    session = fp.compile(fp.lora(graph_of(), 2, 5, ["body"]), fp.losses.cross_entropy, fp.optim.SGD(0.5)).bind(seed=4)
    ids = np.arange(10).reshape(2, 5) % 9
    plain = fp.compile(graph_of()).bind(share=session)
    first = plain.step({"ids": ids}).outputs["logits"]
    adapted = fp.compile(fp.lora(graph_of(), 2, 5, ["body"])).bind(share=session)
    for _ in range(3):
        session.step({"ids": ids, "target": ids})
    np.testing.assert_array_equal(plain.step({"ids": ids}).outputs["logits"], first)
    assert abs(adapted.step({"ids": ids}).outputs["logits"] - first).max() > 1e-3


def test_a_checkpoint_of_the_base_model_is_read_beside_adapters(tmp_path: Path) -> None:
    base = fp.compile(graph_of()).bind(seed=6)
    base.save(tmp_path / "base.safetensors")
    session = fp.compile(fp.lora(graph_of(), 2, 5, MIXED)).bind(seed=7)
    before = {name: array for name, array in session.parameters.items() if ".lora_" in name}
    session.load(tmp_path / "base.safetensors", strict=False)
    for name, array in session.parameters.items():
        np.testing.assert_array_equal(array, before[name] if name in before else base.stored[name])


def test_micro_batches_accumulate_gradients_of_adapters() -> None:
    """Two of one batch each are a step on both."""
    sessions = [
        fp.compile(fp.lora(graph_of(batch), 2, 5, MIXED), fp.losses.cross_entropy, fp.optim.SGD(0.1), accumulate=parts)
        for batch, parts in ((2, 1), (1, 2))
    ]
    whole, parts = (step.bind(seed=8) for step in sessions)
    ids = np.arange(10).reshape(2, 5) % 9
    for _ in range(2):
        whole.step({"ids": ids, "target": ids})
        parts.step({"ids": ids[:, None], "target": ids[:, None]})
    for name, array in whole.parameters.items():
        np.testing.assert_allclose(parts.parameters[name], array, rtol=1e-4, atol=1e-6)


def grouped() -> Graph:
    return fp.trace(lambda x: fp.nn.conv(x, 4, 3, groups=2, name="conv"), fp.spec((1, 2, 5, 5)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fp.lora(graph_of(), targets=["bdy"]),
            "targets: no weight of the model is called 'bdy'; there are 'bod",
        ),
        (lambda: fp.lora(graph_of(), targets=["body.up.bias"]), "'body.up.bias' can have no adapter"),
        (lambda: fp.lora(grouped(), targets=["conv"]), "'conv.weight' can have no adapter: those have .* in one group"),
        (lambda: fp.lora(grouped()), "has no weight that only products read"),
        (lambda: fp.lora(graph_of(), targets=[]), "targets is empty"),
        (lambda: fp.lora(graph_of(), targets="body"), r"targets=\['body'\]"),
        (lambda: fp.lora(graph_of(), targets=["wte"], dora=True), "'wte.weight' is read along both of its axes"),
        (lambda: fp.lora(graph_of(), targets=["body"], dora=1), "dora"),
        (lambda: fp.lora(graph_of(), rank=0), "rank must be a whole number of at least 1"),
        (lambda: fp.lora(graph_of(), alpha=0), "alpha must be in"),
        (lambda: fp.lora(graph_of(), dropout=1.0), "dropout must be in"),
        (lambda: fp.lora(fp.lora(graph_of(), targets=["body"]), targets=["body.up"]), "has an adapter already"),
        (lambda: fp.lora("model.onnx"), "a model must be a Graph"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_told(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(fp.UsageError, match=message):
        call()
