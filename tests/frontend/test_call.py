"""Graphs called in traced functions, and cut at named values: new heads, towers, teachers."""

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
from tests.profile import pick

RNG = np.random.default_rng(7)
TARGET: Any = fp.spec((4, 5))


def images(batch: int = 4, classes: int = 3, drop: float = 0.0) -> Graph:
    """A convolution, batch normalisation and a head."""

    def net(x: fp.Tensor) -> dict[str, fp.Tensor]:
        with fp.nn.scope("body"):
            y = fp.nn.relu(fp.nn.batch_norm(fp.nn.conv(x, 5, 3, name="conv"), name="bn"))
        y = fp.nn.dropout(y.mean((2, 3)), drop)
        return {"logits": fp.nn.linear(y, classes, name="fc")}

    return fp.trace(net, fp.spec((batch, 2, 6, 6)))


def perceptron(width: int, inputs: int = 3, batch: int = 4) -> Graph:
    """tanh of a product."""
    return fp.trace(lambda x: np.tanh(fp.nn.linear(x, width, name="fc")), fp.spec((batch, inputs)), name="perceptron")


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def names(graph: Graph, kind: Kind = Kind.PARAMETER) -> list[str]:
    return [value.name for value in graph.stored if value.kind is kind]


def test_a_backbone_at_top_level_keeps_names_contents_and_results(tmp_path: Path) -> None:
    backbone = images()
    whole = fp.trace(lambda x: {"logits": backbone(x), "more": fp.nn.relu(backbone(x))}, fp.spec((4, 2, 6, 6)))
    assert [value.name for value in whole.stored] == [value.name for value in backbone.stored]
    alone, called = fp.compile(backbone).bind(seed=3), fp.compile(whole).bind(seed=3)
    alone.save(tmp_path / "weights.safetensors")
    other = fp.compile(whole).bind(seed=4, weights=tmp_path / "weights.safetensors")
    x = normal(4, 2, 6, 6)
    wanted = alone.step({"x": x}).outputs["logits"]
    for session in (called, other):
        np.testing.assert_array_equal(session.step({"x": x}).outputs["logits"], wanted)


@pytest.mark.parametrize("engine", ["numpy", "cpu:threads=1"])
def test_a_new_head_trains_as_jax_says(engine: str) -> None:
    """Backbone and head together, cut before the old head: ten steps of SGD by JAX's gradients."""
    backbone = images().until("body", "reduce")
    assert names(backbone) == ["body.conv.weight", "body.conv.bias", "body.bn.weight", "body.bn.bias"]

    def model(x: fp.Tensor) -> fp.Tensor:
        return fp.nn.linear(backbone(x)["reduce"], 2, name="head")

    graph = fp.trace(model, fp.spec((4, 2, 6, 6)))
    session = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.1), target=engine, batch_norm="frozen").bind(seed=1)
    weights = {name: jnp.asarray(array) for name, array in session.parameters.items()}

    def loss(w: dict[str, jax.Array], x: jax.Array, target: jax.Array) -> jax.Array:
        y = jax.lax.conv(x, w["body.conv.weight"], (1, 1), "VALID") + w["body.conv.bias"][:, None, None]
        y = y / jnp.sqrt(1 + 1e-5) * w["body.bn.weight"][:, None, None] + w["body.bn.bias"][:, None, None]
        y = jax.nn.relu(y).mean((2, 3)) @ w["head.weight"].T + w["head.bias"]
        return ((y - target) ** 2).mean()

    step = jax.jit(jax.value_and_grad(loss))
    for _ in range(pick(5, 10, 10)):
        x, target = normal(4, 2, 6, 6), normal(4, 2)
        wanted, gradients = step(weights, x, target)
        weights = {name: array - 0.1 * gradients[name] for name, array in weights.items()}
        assert session.step({"x": x, "target": target}).loss == pytest.approx(float(wanted), rel=1e-4)
    for name, array in session.parameters.items():
        np.testing.assert_allclose(array, weights[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_two_towers_share_weights_or_have_their_own(shared: bool) -> None:
    tower = perceptron(5)

    def model(x: fp.Tensor, z: fp.Tensor) -> fp.Tensor:
        with fp.nn.scope("left"):
            a = tower(x)
        return a * tower(z, name="left" if shared else "right")

    graph = fp.trace(model, fp.spec((4, 3)), fp.spec((4, 3)))
    sides = ["left"] if shared else ["left", "right"]
    assert names(graph) == [f"{side}.fc.{part}" for side in sides for part in ("weight", "bias")]
    session = fp.compile(graph, fp.losses.mean, None).bind(seed=2)
    w = {name: jnp.asarray(array) for name, array in session.parameters.items()}
    x, z = normal(4, 3), normal(4, 3)

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        def side(name: str, x: np.ndarray) -> jax.Array:
            return jnp.tanh(x @ w[f"{name}.fc.weight"].T + w[f"{name}.fc.bias"])

        return (side("left", x) * side(sides[-1], z)).mean()

    wanted, gradients = jax.jit(jax.value_and_grad(loss))(w)
    found = session.step({"x": x, "z": z})
    assert found.loss == pytest.approx(float(wanted), rel=1e-5)
    for name, array in gradients.items():
        np.testing.assert_allclose(found.gradients[name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["numpy", "cpu:threads=1"])
def test_running_statistics_follow_each_call_of_a_shared_backbone_in_turn(engine: str) -> None:
    def net(x: fp.Tensor) -> fp.Tensor:
        return fp.nn.batch_norm(x, momentum=0.7, name="bn")

    norm = fp.trace(net, fp.spec((4, 3)))
    graph = fp.trace(lambda x, z: norm(x) * norm(z), fp.spec((4, 3)), fp.spec((4, 3)))
    session = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), target=engine).bind()
    x, z = normal(4, 3), normal(4, 3)
    session.step({"x": x, "z": z})
    mean, variance = np.zeros(3), np.ones(3)
    for batch in (x, z):  # as PyTorch does, but for the factor n / (n - 1)
        mean, variance = 0.7 * mean + 0.3 * batch.mean(0), 0.7 * variance + 0.3 * batch.var(0)
    np.testing.assert_allclose(session.stored["bn.running_mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.stored["bn.running_var"], variance, rtol=1e-5, atol=1e-6)


def test_a_teacher_has_no_gradient_no_state_and_is_in_evaluation_mode() -> None:
    teacher, student = fp.frozen(images(drop=0.5)), images(drop=0.0)

    def model(x: fp.Tensor) -> dict[str, fp.Tensor]:
        return {"logits": student(x), "taught": teacher(x, name="teacher")}

    graph = fp.trace(model, fp.spec((4, 2, 6, 6)))
    own = {name.removeprefix("teacher.") for name in names(graph, Kind.FROZEN)}
    assert own == set(names(student)) and all(name.startswith("teacher.") for name in names(graph, Kind.FROZEN))
    step = fp.compile(graph, lambda a, b: ((a - b) ** 2).mean(), fp.optim.Momentum(0.1), outputs=["taught", "logits"])
    assert not any("teacher" in value.name for value in step.graph.stored if value.kind is Kind.STATE)
    session, alone = step.bind(seed=5), fp.compile(teacher).bind(seed=9)
    for name in [*names(teacher, Kind.FROZEN), *names(teacher, Kind.BUFFER)]:
        content = np.abs(normal(*alone.stored[name].shape)) + 0.5
        alone.stored[name] = session.stored[f"teacher.{name}"] = content
    before = {name: session.stored[name] for name in session.stored if name.startswith("teacher.")}
    x = normal(4, 2, 6, 6)
    found = session.step({"x": x})
    np.testing.assert_allclose(found.outputs["taught"], alone.step({"x": x}).outputs["logits"], rtol=1e-5, atol=1e-6)
    assert found.loss == pytest.approx(float(((found.outputs["taught"] - found.outputs["logits"]) ** 2).mean()), 1e-4)
    assert all((session.stored[name] == array).all() for name, array in before.items())
    assert (session.stored["body.bn.running_mean"] != 0).any()


def test_a_model_within_a_loss_is_a_teacher_of_features() -> None:
    critic = fp.frozen(perceptron(6, inputs=5))
    student = perceptron(5)

    def loss(y: fp.Tensor, target: fp.Tensor = TARGET) -> fp.Tensor:
        return ((critic(y, name="critic") - critic(target, name="critic")) ** 2).mean()

    step = fp.compile(student, loss, fp.optim.SGD(0.1))
    assert names(step.graph) == ["fc.weight", "fc.bias"]
    assert names(step.graph, Kind.FROZEN) == ["critic.fc.weight", "critic.fc.bias"]
    session = step.bind(seed=1)
    before = {name: np.asarray(array, np.float64) for name, array in session.parameters.items()}
    x, target = normal(4, 3), normal(4, 5)
    found = session.step({"x": x, "target": target})

    def features(y: np.ndarray) -> np.ndarray:
        return np.tanh(y @ before["critic.fc.weight"].T + before["critic.fc.bias"])

    y = np.tanh(x @ before["fc.weight"].T + before["fc.bias"])
    assert found.loss == pytest.approx(((features(y) - features(target)) ** 2).mean(), rel=1e-5)
    assert (session.parameters["fc.weight"] != before["fc.weight"].astype(np.float32)).any()
    examiner = fp.compile(student).bind(share=session, poison=True)  # the loss's weights lie behind the model's own
    kept = dict(session.parameters)
    y = np.tanh(x @ kept["fc.weight"].T + kept["fc.bias"])
    np.testing.assert_allclose(next(iter(examiner.step({"x": x}).outputs.values())), y, rtol=1e-5, atol=1e-6)
    assert all((session.parameters[name] == array).all() for name, array in kept.items())
    measured = fp.compile(fp.evaluation(student, loss)).bind(share=session).step({"x": x, "target": target}).outputs
    assert session.step({"x": x, "target": target}).loss == pytest.approx(float(measured["loss"]), rel=1e-6)


def test_what_is_said_of_a_model_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx_model(path)
    backbone = fp.from_onnx(path, freeze=["fc.bias"])
    graph = fp.trace(lambda x: backbone(x, name="left") + backbone(x, name="left"), fp.spec((2, 3)))
    (bias,) = [value for value in graph.stored if value.name == "left.fc.bias"]
    assert bias.kind is Kind.FROZEN and "freeze='fc.bias'" in bias.why
    sources = {node.source for node in graph.nodes if node.name.startswith("left/")}
    assert any("model.onnx: node" in source for source in sources)
    assert len(set(graph.notes)) == len(graph.notes) and set(backbone.notes) <= set(graph.notes)
    session, alone = fp.compile(graph).bind(seed=1), fp.compile(backbone).bind(seed=2)
    x = normal(2, 3)
    (found,) = session.step({"x": x}).outputs.values()
    (wanted,) = alone.step({backbone.inputs[0].name: x}).outputs.values()
    np.testing.assert_allclose(found, 2 * wanted, rtol=1e-6)


def onnx_model(path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight, bias = numpy_helper.from_array(normal(3, 4), "fc.weight"), numpy_helper.from_array(normal(4), "fc.bias")
    nodes = [
        helper.make_node("MatMul", ["in", "fc.weight"], ["product"], name="fc/MatMul"),
        helper.make_node("Add", ["product", "fc.bias"], ["sum"], name="fc/Add"),
        helper.make_node("Tanh", ["sum"], ["out"], name="act"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, k]) for n, k in (("in", 3), ("out", 4)))
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight, bias])), path)


def test_a_model_is_cut_at_values_nodes_and_parts(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx_model(path)
    graph = fp.from_onnx(path)
    assert graph.names[-2:] == ("sum", "out")
    x = normal(2, 3)
    weight, bias = (fp.compile(graph).bind().stored[name] for name in ("fc.weight", "fc.bias"))
    for name, wanted in (("sum", x @ weight + bias), ("fc/Add", x @ weight + bias), ("fc", x @ weight + bias)):
        part = graph.until(name)
        assert list(part.outputs) == [name]
        np.testing.assert_allclose(fp.compile(part).bind().step({"in": x}).outputs[name], wanted, rtol=1e-5)
    both = graph.until("product", "out")
    assert list(both.outputs) == ["product", "out"] and len(both.nodes) == len(graph.nodes)
    assert names(graph.until("product")) == ["fc.weight"]


def test_inputs_that_are_not_needed_go() -> None:
    def net(x: fp.Tensor, z: fp.Tensor) -> dict[str, fp.Tensor]:
        y = np.exp(x)
        return {"a": y, "b": y + z}

    graph = fp.trace(net, fp.spec(3), fp.spec(3))
    assert [value.name for value in graph.until("a").inputs] == ["x"]
    assert [value.name for value in graph.since("a").inputs] == [graph.until("a").outputs["a"].name, "z"]


@pytest.mark.parametrize("seed", range(pick(3, 6, 20)))
def test_both_parts_of_a_model_in_a_row_are_the_model(seed: int) -> None:
    """Cut at a drawn value, and called one behind the other: the same weights, the same results."""
    graph = images()
    rng = np.random.default_rng(seed)
    name = str(rng.choice(graph.names[:-1]))
    try:
        first, second = graph.until(name), graph.since(name)
    except fp.UsageError as error:
        assert "several results" in str(error)
        return
    joined = fp.trace(lambda x: second(first(x)), fp.spec((4, 2, 6, 6)))
    assert {value.name for value in joined.stored} == {value.name for value in graph.stored}
    x = normal(4, 2, 6, 6)
    found, wanted = (fp.compile(g).bind(seed=seed).step({"x": x}).outputs for g in (joined, graph))
    np.testing.assert_array_equal(*[next(iter(each.values())) for each in (found, wanted)])


def test_validation_with_a_loss_of_ones_own_shares_the_weights() -> None:
    """A loss without gradients is an output of a function that calls the model."""
    graph = fp.trace(lambda x: fp.nn.linear(perceptron(5)(x), 3, name="head"), fp.spec((4, 3)), name="model")
    session = fp.compile(graph, fp.losses.mse, fp.optim.Adam(0.1), freeze=["fc"]).bind(seed=1)

    def evaluate(x: fp.Tensor, target: fp.Tensor) -> dict[str, fp.Tensor]:
        y = graph(x)
        return {"loss": fp.losses.mse(y, target), "largest": abs(y - target).max()}

    checker = fp.compile(fp.trace(evaluate, fp.spec((4, 3)), fp.spec((4, 3)))).bind(share=session)
    x, target = normal(4, 3), normal(4, 3)
    for _ in range(3):
        value = float(checker.step({"x": x, "target": target}).outputs["loss"])
        assert session.step({"x": x, "target": target}).loss == pytest.approx(value, rel=1e-6)


def model_with(use: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: fp.trace(use, fp.spec((4, 3)))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: perceptron(5)(np.zeros((4, 3))), fp.UsageError, "called in a function that foreplan.trace runs"),
        (lambda: perceptron(5)(), fp.UsageError, "called in a function that foreplan.trace runs"),
        (
            model_with(lambda x: perceptron(5, 2)(x)),
            fp.ShapeError,
            r"'x' as float32\[4,2\], and was given float32\[4,3",
        ),
        (model_with(lambda x: perceptron(5, batch=2)(x)), fp.ShapeError, "shapes are static; import or trace"),
        (model_with(lambda x: perceptron(5)(x, x)), fp.UsageError, "and was given 2 inputs"),
        (model_with(lambda x: perceptron(5)(x, x=x)), fp.UsageError, "and was given 'x' twice"),
        (model_with(lambda x: perceptron(5)(y=x)), fp.UsageError, "has no input 'y'; it takes x: float32"),
        (model_with(lambda x: perceptron(5)(x=x, y=3)), fp.UsageError, "has no input 'y'"),
        (model_with(lambda x: perceptron(5)(x) + perceptron(5)(x)), fp.TraceError, "already a parameter 'fc.weight'"),
        (
            model_with(lambda x: fp.compile(perceptron(5), fp.losses.mean, fp.optim.SGD(0.1)).graph(x)),
            fp.TraceError,
            "is a training step; call the model itself",
        ),
        (lambda: images().until("boddy"), fp.UsageError, "has no value 'boddy'; there are 'body'"),
        (lambda: images().until(), fp.UsageError, "cut at names of values, such as 'logits'"),
        (lambda: images().since("logits", "body"), fp.UsageError, "depends on 'body'"),
    ],
)
def test_what_cannot_be_is_told(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
