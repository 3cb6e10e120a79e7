"""Differentiation of whole graphs, beside the texts of `differentiate/`: errors, and ops of odd derivatives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from foreplan.base.errors import ModelError
from foreplan.graph import Builder, Fill, GraphBuilder, Kind, Op, TensorType, Value
from foreplan.graph.op import Arrays, Types
from foreplan.graph.types import FLOAT64
from foreplan.ops.map import Map, elementwise
from foreplan.ops.norm.rows import LayerNorm, RMSNorm
from foreplan.ops.reduce import reduce
from foreplan.passes import differentiate, simplified
from tests.ops.check import check_vjp, evaluate

F = FLOAT64


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
