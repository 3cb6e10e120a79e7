"""Differentiation of whole graphs: against finite differences, and by the shape of what is built."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.errors import ModelError
from foreplan.graph import Builder, Fill, Graph, Kind, Normal, TensorType
from foreplan.graph.types import FLOAT64, INT64
from foreplan.ops.expr import relu, tanh
from foreplan.ops.join import split
from foreplan.ops.map import Map, elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.reduce import reduce
from foreplan.passes import differentiate, simplified
from foreplan.passes.optimizer import Nesterov
from tests.ops.check import evaluate

F = FLOAT64


def two_layers(tied: bool = False) -> Graph:
    b = Builder("two_layers")
    x = b.input("x", TensorType(F, (5, 4)))
    w1 = b.store("w1", TensorType(F, (4, 4)), Kind.PARAMETER, Normal(1.0))
    w2 = w1 if tied else b.store("w2", TensorType(F, (4, 4)), Kind.PARAMETER, Normal(1.0))
    bias = b.store("bias", TensorType(F, (4,)), Kind.PARAMETER, Fill(0.1))
    h = elementwise(b, lambda a, c: tanh(a + c), matmul(b, x, w1), bias, name="hidden")
    y = elementwise(b, lambda a, h: relu(a) + h * h, matmul(b, h, w2), h, name="top")
    return b.finish({}, loss=reduce(b, "mean", y))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_equal_central_differences(tied: bool) -> None:
    graph = two_layers(tied)
    rng = np.random.default_rng(1)
    inputs = {"x": rng.normal(size=(5, 4))}
    stored = {v.name: rng.normal(size=v.shape) for v in graph.parameters}
    training = simplified(differentiate(graph))
    values = evaluate(training, inputs, stored)
    assert graph.loss is not None
    for name, gradient in training.gradients.items():
        got = values[gradient]
        for index in np.ndindex(got.shape):
            losses = []
            for step in (1e-6, -1e-6):
                moved = {k: v.copy() for k, v in stored.items()}
                moved[name][index] += step
                losses.append(float(evaluate(graph, inputs, moved, hard=False)[graph.loss]))
            assert got[index] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-6, abs=1e-9)


def test_no_gradient_is_computed_that_nobody_reads() -> None:
    training = differentiate(two_layers())
    read = {value for node in training.nodes for value in node.inputs} | set(training.results)
    assert all(not read.isdisjoint(node.outputs) for node in training.nodes)
    # x is no parameter: nothing in the graph has its cotangent's shape and place.
    assert not [
        node
        for node in training.nodes
        if node.op.name == "matmul" and "transpose_b" in str(node.op) and node.inputs[1].name == "w1"
    ]


def test_a_parameter_is_updated_right_behind_its_gradient_and_after_every_reader() -> None:
    training = differentiate(two_layers(), Nesterov(0.1))
    order = {node: i for i, node in enumerate(training.nodes)}
    for old, new in training.updates.items():
        if old.kind is not Kind.PARAMETER:
            continue
        update = training.producer[new]
        gradient = training.producer[update.inputs[1]]
        readers = [order[node] for node in training.readers[old] if node is not update]
        assert order[update] > max(readers)
        # Between the last of them and the update stands at most a sum of cotangents of the same forward node.
        between = training.nodes[max(order[gradient], *readers) + 1 : order[update]]
        assert all(node.name.endswith("/sum") for node in between)


def test_the_weight_gradient_stands_before_the_data_gradient() -> None:
    training = differentiate(two_layers(), Nesterov(0.1))
    names = [node.op for node in training.nodes if node.name.startswith("matmul.1/grad")]
    assert str(names[0]) == "matmul(transpose_a=True)"
    assert str(names[1]) == "matmul(transpose_b=True)"


def test_a_parameter_out_of_the_loss_s_reach_is_reported() -> None:
    b = Builder("idle")
    x = b.input("x", TensorType(F, (3,)))
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    b.store("unused", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    loss = reduce(b, "sum", elementwise(b, lambda a, c: a * c, x, w))
    training = differentiate(b.finish({}, loss=loss), Nesterov(0.1))
    assert any("unused" in note for note in training.notes)
    assert {value.name for value in training.updates} == {"step", "w", "w/velocity"}


def test_a_loss_without_parameters_is_refused() -> None:
    b = Builder("still")
    x = b.input("x", TensorType(F, (3,)))
    graph = b.finish({}, loss=reduce(b, "sum", x))
    with pytest.raises(ModelError, match="depends on no parameter"):
        differentiate(graph)


def test_a_graph_without_a_loss_is_refused() -> None:
    b = Builder("none")
    x = b.input("x", TensorType(F, (3,)))
    with pytest.raises(ModelError, match="no loss"):
        differentiate(b.finish({"x": x}))


def test_an_op_without_a_derivative_is_named() -> None:
    b = Builder("prod")
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    loss = b.apply(type(reduce(b, "sum", w) and b.nodes[-1].op)("prod", (0,)), w, name="product")
    with pytest.raises(ModelError, match="product"):
        differentiate(b.finish({}, loss=loss))


def test_the_gradients_of_a_split_are_one_concat() -> None:
    b = Builder("split")
    w = b.store("w", TensorType(F, (2, 6)), Kind.PARAMETER, Normal(1.0))
    first, second, third = split(b, w, [1, 2, 3], axis=1)
    y = elementwise(b, lambda a, c: a * c, first, second)
    loss = elementwise(b, lambda a, c: a + c, reduce(b, "sum", y), reduce(b, "sum", third))
    training = simplified(differentiate(b.finish({}, loss=loss)))
    ops = [node.op.name for node in training.nodes if node.outputs[0].kind is Kind.GRADIENT]
    assert "concat" in ops and "unslice" not in ops
    x = np.random.default_rng(0).normal(size=(2, 6))
    values = evaluate(training, {}, {"w": x})
    expected = np.hstack([x[:, 1:3].sum(1, keepdims=True), np.repeat(x[:, :1], 2, 1), np.ones((2, 3))])
    np.testing.assert_allclose(values[training.gradients["w"]], expected)


def test_integers_carry_no_gradient() -> None:
    b = Builder("ints")
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(2.0))
    i = b.input("i", TensorType(INT64, (3,)))
    (y,) = b.node(Map(("(a0 * float64(a1))",)), w, i)
    training = differentiate(b.finish({}, loss=reduce(b, "sum", y)))
    values = evaluate(training, {"i": np.array([1, 2, 3])})
    np.testing.assert_array_equal(values[training.gradients["w"]], [1.0, 2.0, 3.0])
