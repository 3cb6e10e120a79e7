"""Differentiation of whole graphs: against finite differences, and by the shape of what is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from foreplan.base.errors import ModelError
from foreplan.graph import Builder, Fill, Graph, GraphBuilder, Kind, Normal, Op, TensorType, Value
from foreplan.graph.op import Arrays, Types
from foreplan.graph.types import FLOAT64, INT64
from foreplan.ops.expr import call, relu, tanh
from foreplan.ops.join import split
from foreplan.ops.map import Map, elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.norm.rows import LayerNorm, RMSNorm
from foreplan.ops.reduce import reduce
from foreplan.passes import differentiate, simplified, updating
from foreplan.passes.optimizer import Nesterov
from tests.ops.check import check_vjp, evaluate
from tests.passes.steps import training_step

F = FLOAT64


def two_layers(tied: bool = False) -> Graph:
    b = GraphBuilder("two_layers")
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
    training = training_step(graph)
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
    training = differentiate(two_layers(), updating(Nesterov(0.1)))
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
    training = differentiate(two_layers(), updating(Nesterov(0.1)))
    names = [node.op for node in training.nodes if node.name.startswith("matmul.1/grad")]
    assert str(names[0]) == "matmul(transpose_a=True)"
    assert str(names[1]) == "matmul(transpose_b=True)"


def test_a_parameter_out_of_the_loss_s_reach_is_reported() -> None:
    b = GraphBuilder("idle")
    x = b.input("x", TensorType(F, (3,)))
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    b.store("unused", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    loss = reduce(b, "sum", elementwise(b, lambda a, c: a * c, x, w))
    training = differentiate(b.finish({}, loss=loss), updating(Nesterov(0.1)))
    assert any("unused" in note for note in training.notes)
    assert {value.name for value in training.updates} == {"step", "w", "w/velocity"}


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, None),
        (1, "idle0"),
        (5, "idle0, idle1, idle2, idle3, idle4"),
        (6, "idle0, idle1, idle2, idle3, idle4 and 1 more"),
        (9, "idle0, idle1, idle2, idle3, idle4 and 4 more"),
    ],
)
def test_idle_parameters_are_named_in_one_note(count: int, told: str | None) -> None:
    b = GraphBuilder("idle")
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    for i in range(count):
        b.store(f"idle{i}", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    training = differentiate(b.finish({}, loss=reduce(b, "sum", w)))
    wanted = () if told is None else (f"the loss does not depend on {told}: no gradient, no update",)
    assert tuple(training.notes) == wanted


def test_a_loss_without_parameters_is_refused() -> None:
    b = GraphBuilder("still")
    x = b.input("x", TensorType(F, (3,)))
    graph = b.finish({}, loss=reduce(b, "sum", x))
    with pytest.raises(ModelError, match="depends on no parameter"):
        differentiate(graph)


@pytest.mark.parametrize("op", [LayerNorm(1, 1e-5), RMSNorm(1, 1e-5)], ids=str)
def test_statistics_of_normalisations_have_gradients_too(op: Op) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5))
    check_vjp(lambda b, v: b.node(op, v)[1:], x)
    check_vjp(lambda b, v: b.node(op, v), x)


def test_a_graph_without_a_loss_is_refused() -> None:
    b = GraphBuilder("none")
    x = b.input("x", TensorType(F, (3,)))
    with pytest.raises(ModelError, match="no loss"):
        differentiate(b.finish({"x": x}))


@dataclass(frozen=True)
class Opaque(Op):
    """x as it is; it says nothing of a derivative."""

    name: ClassVar[str] = "opaque"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        return tuple(inputs)

    def flops(self, inputs: Types, outputs: Types) -> int:
        return 0

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        np.copyto(outputs[0], inputs[0])


@pytest.mark.parametrize("source", ["", "model.py:3"])
def test_an_op_without_a_derivative_is_named_with_its_source(source: str) -> None:
    b = GraphBuilder("opaque")
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    b.source = source
    loss = reduce(b, "sum", b.apply(Opaque(), w, name="product"))
    where = f" ({source})" if source else ""
    with pytest.raises(
        ModelError, match=re.escape(f"node 'product'{where} cannot be differentiated: the op opaque has no derivative")
    ):
        differentiate(b.finish({}, loss=loss))


def test_what_reaches_no_parameter_needs_no_derivative() -> None:
    b = GraphBuilder("given")
    x = b.input("x", TensorType(F, (3, 4)))
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    product = b.apply(Opaque(), reduce(b, "prod", x, 1))
    (y,) = b.node(Careless(("(a0 * a1)",)), product, w)
    training = differentiate(b.finish({}, loss=reduce(b, "sum", y)))
    given = np.arange(12.0).reshape(3, 4)
    found = evaluate(simplified(training), {"x": given}, {"w": np.ones(3)}, hard=False)
    np.testing.assert_array_equal(found[simplified(training).gradients["w"]], given.prod(axis=1))


@dataclass(frozen=True)
class Careless(Map):
    """A product that gives a gradient of either factor, whoever asks; of the wrong type, if told so."""

    name: ClassVar[str] = "careless"
    wrong: bool = False

    def vjp(
        self, b: Builder, inputs: Sequence[Value], outputs: Sequence[Value], cotangents: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (g,) = cotangents
        assert g is not None
        flows = [elementwise(b, lambda x, g: x * g, x, g) for x in reversed(inputs)]
        return [reduce(b, "sum", flow) for flow in flows] if self.wrong else flows


def test_a_derivative_of_the_wrong_type_is_a_defect_that_names_the_op() -> None:
    b = GraphBuilder("wrong")
    u, w = (b.store(name, TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0)) for name in "uw")
    (y,) = b.node(Careless(("(a0 * a1)",), wrong=True), u, w)
    with pytest.raises(
        ModelError, match=r"the vjp of careless gives .*float64\[\].* as the cotangent of .*u.*float64\[3\]"
    ):
        differentiate(b.finish({}, loss=reduce(b, "sum", y)))


@pytest.mark.parametrize("first", [False, True])
def test_a_way_without_gradient_adds_nothing_to_the_others(first: bool) -> None:
    """Steps of floor have no slope; it is pulled back before or after the other reader."""
    b = GraphBuilder("floor")
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(1.0))
    ways = [lambda: elementwise(b, lambda x: call("floor", x), w), lambda: elementwise(b, lambda x: x * x, w)]
    y, z = (way() for way in (ways if first else ways[::-1]))
    training = differentiate(b.finish({}, loss=reduce(b, "sum", elementwise(b, lambda y, z: y + z, y, z))))
    values = np.array([0.25, -1.5, 3.75])
    found = evaluate(training, {}, {"w": values})
    np.testing.assert_array_equal(found[training.gradients["w"]], 2 * values)


def test_the_gradients_of_a_split_are_one_concat() -> None:
    b = GraphBuilder("split")
    w = b.store("w", TensorType(F, (2, 6)), Kind.PARAMETER, Normal(1.0))
    first, second, third = split(b, w, [1, 2, 3], axis=1)
    y = elementwise(b, lambda a, c: a * c, first, second)
    loss = elementwise(b, lambda a, c: a + c, reduce(b, "sum", y), reduce(b, "sum", third))
    training = training_step(b.finish({}, loss=loss))
    ops = [node.op.name for node in training.nodes if node.outputs[0].kind is Kind.GRADIENT]
    assert "concat" in ops and "unslice" not in ops
    x = np.random.default_rng(0).normal(size=(2, 6))
    values = evaluate(training, {}, {"w": x})
    expected = np.hstack([x[:, 1:3].sum(1, keepdims=True), np.repeat(x[:, :1], 2, 1), np.ones((2, 3))])
    np.testing.assert_allclose(values[training.gradients["w"]], expected)


def test_integers_carry_no_gradient() -> None:
    b = GraphBuilder("ints")
    w = b.store("w", TensorType(F, (3,)), Kind.PARAMETER, Fill(2.0))
    i = b.input("i", TensorType(INT64, (3,)))
    (y,) = b.node(Map(("(a0 * float64(a1))",)), w, i)
    training = differentiate(b.finish({}, loss=reduce(b, "sum", y)))
    values = evaluate(training, {"i": np.array([1, 2, 3])})
    np.testing.assert_array_equal(values[training.gradients["w"]], [1.0, 2.0, 3.0])
