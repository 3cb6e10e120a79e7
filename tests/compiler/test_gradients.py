"""Gradients of inputs, and marks: where none passes, and where one takes another way. JAX is the judge."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foreplan as fp

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)


def net(x: fp.Tensor) -> fp.Tensor:
    return np.tanh(x @ fp.nn.parameter("w", (6, 3), W)) * 2.0


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("optimizer", [None, fp.optim.SGD(0.1), fp.optim.AdamW(clip_norm=0.1)], ids=str)
def test_gradients_of_inputs_come_with_the_step(target: str, optimizer: Any) -> None:
    graph = fp.trace(net, fp.spec((4, 6)))
    step = fp.compile(graph, fp.losses.mean, optimizer, target=target, gradients=["x"])
    found = step.bind().step({"x": X})
    wanted = jax.grad(lambda x: (jnp.tanh(x @ W) * 2.0).mean())(X)
    np.testing.assert_allclose(found.gradients["x"], wanted, rtol=1e-5, atol=1e-7)
    assert set(found.gradients) == ({"x"} if optimizer else {"x", "w"})


@pytest.mark.parametrize("precision, rtol", [("bf16", 3e-2), ("fp16", 4e-3)])
def test_gradients_of_inputs_are_those_of_the_loss_in_narrow_steps_too(precision: str, rtol: float) -> None:
    """And not of the loss times a scale."""
    step = fp.compile(
        fp.trace(net, fp.spec((4, 6))), fp.losses.mean, fp.optim.SGD(0.1), precision=precision, gradients=["x"]
    )
    found = step.bind().step({"x": X})
    wanted = jax.grad(lambda x: (jnp.tanh(x @ W) * 2.0).mean())(X)
    np.testing.assert_allclose(found.gradients["x"], wanted, rtol=rtol, atol=rtol * np.abs(wanted).max())


def test_an_input_that_is_not_read_has_a_gradient_of_zero() -> None:
    graph = fp.trace(lambda x, y: net(x), fp.spec((4, 6)), fp.spec((2, 3)))
    names = [value.name for value in graph.inputs]
    found = (
        fp.compile(graph, fp.losses.mean, gradients=names).bind().step({names[0]: X, names[1]: np.zeros((2, 3), "f4")})
    )
    assert found.gradients[names[1]].shape == (2, 3) and not found.gradients[names[1]].any()
    assert found.gradients[names[0]].any()


def test_a_model_without_parameters_may_be_asked_for_the_gradient_of_its_input() -> None:
    found = fp.compile(fp.trace(lambda x: x * x, fp.spec((4, 6))), fp.losses.sum, gradients=["x"]).bind().step({"x": X})
    np.testing.assert_allclose(found.gradients["x"], 2 * X, rtol=1e-6)


def test_an_input_that_is_returned_as_it_is_has_the_gradient_of_ones() -> None:
    found = fp.compile(fp.trace(lambda x: x, fp.spec((4, 6))), fp.losses.sum, gradients=["x"]).bind().step({"x": X})
    assert (found.gradients["x"] == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradients": ["y"]}, "there is no input 'y'; the inputs are x"),
        ({"gradients": ["ids"]}, "'ids' is int64"),
        ({"gradients": ["x"], "accumulate": 2}, "leave gradients or accumulate out"),
        ({"gradients": "x"}, "list of names"),
    ],
)
def test_gradients_that_there_are_not_are_told(options: dict[str, Any], message: str) -> None:
    graph = fp.trace(lambda x, ids: net(x) + ids, fp.spec((4, 6)), fp.spec((4, 3), "int64"))
    names = [value.name for value in graph.inputs]
    assert names == ["x", "ids"]
    with pytest.raises(fp.UsageError, match=message):
        fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), **options)


def test_a_plan_file_keeps_the_gradients_of_inputs(tmp_path: Any) -> None:
    step = fp.compile(fp.trace(net, fp.spec((4, 6))), fp.losses.mean, fp.optim.SGD(0.1), gradients=["x"])
    step.save(tmp_path / "a.plan")
    again = fp.load_plan(tmp_path / "a.plan")
    ours, theirs = (each.bind().step({"x": X}) for each in (step, again))
    np.testing.assert_array_equal(ours.gradients["x"], theirs.gradients["x"])
    assert again.options.gradients == ("x",)


# Marks.


def stopped(x: Any, w: Any, stop: Any, tanh: Any) -> Any:
    y = tanh(x @ w)
    return y * stop(y) + stop(x @ w) * 3.0 + y


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_no_gradient_comes_back_through_a_stop(target: str) -> None:
    graph = fp.trace(lambda x: stopped(x, fp.nn.parameter("w", (6, 3), W), fp.stop_gradient, np.tanh), fp.spec((4, 6)))
    found = fp.compile(graph, fp.losses.mean, target=target, gradients=["x"]).bind().step({"x": X})
    loss = lambda x, w: stopped(x, w, jax.lax.stop_gradient, jnp.tanh).mean()  # noqa: E731
    value, wanted = jax.value_and_grad(loss, (0, 1))(X, W)
    np.testing.assert_allclose(found.loss, value, rtol=1e-5)
    for name, gradient in zip("xw", wanted):
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_what_only_reaches_the_loss_through_a_stop_is_not_trained() -> None:
    def model(x: fp.Tensor) -> fp.Tensor:
        target = fp.stop_gradient(fp.nn.linear(x, 3, name="teacher"))
        return (fp.nn.linear(x, 3, name="student") - target) ** 2

    step = fp.compile(fp.trace(model, fp.spec((4, 6))), fp.losses.mean, fp.optim.Momentum(0.1))
    names = {value.name for value in step.graph.stored}  # type: ignore[union-attr]
    assert not any("teacher" in name and "velocity" in name for name in names)
    session = step.bind()
    before = dict(session.parameters)
    session.step({"x": X})
    moved = {name for name, array in session.parameters.items() if (array != before[name]).any()}
    assert moved == {"student.weight", "student.bias"}
    assert any("does not depend on teacher" in note for note in step.program.notes)


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_a_rounded_value_has_the_gradient_of_what_was_rounded(target: str) -> None:
    def quantized(x: fp.Tensor) -> fp.Tensor:
        y = np.tanh(x @ fp.nn.parameter("w", (6, 3), W)) * 4.0
        return fp.straight_through(np.round(y), y) ** 2

    def theirs(w: Any) -> Any:
        y = jnp.tanh(X @ w) * 4.0
        return ((y + jax.lax.stop_gradient(jnp.round(y) - y)) ** 2).mean()

    graph = fp.trace(quantized, fp.spec((4, 6)))
    found = fp.compile(graph, fp.losses.mean, target=target).bind().step({"x": X})
    value, wanted = jax.value_and_grad(theirs)(W)
    np.testing.assert_allclose(found.loss, value, rtol=1e-5)
    np.testing.assert_allclose(found.gradients["w"], wanted, rtol=1e-4, atol=1e-6)
    forward = fp.compile(graph, target=target).bind().step({"x": X}).outputs["output"]
    np.testing.assert_allclose(forward, np.round(np.tanh(X @ W) * 4.0) ** 2, rtol=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_marks_leave_no_trace_in_a_program(train: bool) -> None:
    def model(x: fp.Tensor) -> fp.Tensor:
        y = fp.nn.linear(x, 3)
        return fp.straight_through(np.sign(y), fp.stop_gradient(y) + y)

    loss = fp.losses.mean if train else None
    step = fp.compile(fp.trace(model, fp.spec((4, 6))), loss)
    ops = {node.op.name for node in step.graph.nodes}  # type: ignore[union-attr]
    assert not ops & {"stop_gradient", "straight_through"}


def test_what_stands_for_a_gradient_has_the_type_of_the_result() -> None:
    with pytest.raises(fp.ForeplanError, match="must have one type"):
        fp.trace(lambda x: fp.straight_through(x, x[:2]), fp.spec((4, 6)))


@fp.custom_gradient
def clipped(x: fp.Tensor, scale: fp.Tensor) -> Any:
    """x times a scale; its gradients are clipped, and what is clipped depends on both cotangents."""
    y, z = x * scale, np.tanh(x)

    def backward(of_y: fp.Tensor, of_z: fp.Tensor) -> Any:
        return np.clip(of_y * scale, -0.1, 0.1) + of_z * of_z, (of_y * x).sum(axis=0) * 3.0

    return (y, z), backward


@jax.custom_vjp
def clipped_by_jax(x: Any, scale: Any) -> Any:
    return x * scale, jnp.tanh(x)


def _forward(x: Any, scale: Any) -> Any:
    return clipped_by_jax(x, scale), (x, scale)


def _backward(kept: Any, flows: Any) -> Any:
    (x, scale), (of_y, of_z) = kept, flows
    return jnp.clip(of_y * scale, -0.1, 0.1) + of_z * of_z, (of_y * x).sum(axis=0) * 3.0


clipped_by_jax.defvjp(_forward, _backward)


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("both", [True, False])
def test_a_gradient_that_is_given_is_the_one_that_is_used(target: str, both: bool) -> None:
    v = np.linspace(0.5, 2.0, 3, dtype=np.float32)

    def model(x: fp.Tensor) -> fp.Tensor:
        y, z = clipped(np.tanh(x @ fp.nn.parameter("w", (6, 3), W)), fp.nn.parameter("v", (3,), v))
        return (y**2 + z**3 if both else y**2).mean()

    def by_jax(w: Any, v: Any) -> Any:
        y, z = clipped_by_jax(jnp.tanh(X @ w), v)
        return (y**2 + z**3 if both else y**2).mean()

    graph = fp.trace(model, fp.spec((4, 6)))
    assert len(graph.inputs) == 1
    step = fp.compile(graph, lambda y: y, None, target=target)
    assert not any(node.op.name == "custom_gradient" for node in step.graph.nodes)
    found = step.bind().step({"x": X})
    loss, (of_w, of_v) = jax.value_and_grad(by_jax, (0, 1))(W, v)
    assert found.loss == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(found.gradients["w"], of_w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.gradients["v"], of_v, rtol=1e-4, atol=1e-6)
    (same,) = fp.compile(graph, target=target).bind().step({"x": X}).outputs.values()
    assert same == pytest.approx(float(loss), rel=1e-5)


def test_a_gradient_that_is_given_wrongly_is_refused() -> None:
    one = fp.custom_gradient(lambda x: x * 2.0)
    with pytest.raises(fp.UsageError, match="is to return its result and a function"):
        fp.trace(lambda x: one(x), fp.spec((4, 6)))
    two = fp.custom_gradient(lambda x: (x * 2.0, lambda g: (g, g)))
    with pytest.raises(fp.UsageError, match="has 1 arguments, and its backward gives 2 gradients"):
        fp.trace(lambda x: two(x), fp.spec((4, 6)))
    other = fp.custom_gradient(lambda x: (x * 2.0, lambda g: g.sum(axis=0)))
    with pytest.raises(fp.ShapeError, match="the gradient of argument 0"):
        fp.trace(lambda x: other(x), fp.spec((4, 6)))
