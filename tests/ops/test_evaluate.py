"""Kernels run while a graph is made."""

from __future__ import annotations

import numpy as np

from foreplan.graph import GraphBuilder, Kind, TensorType, as_dtype
from foreplan.graph.init import Array
from foreplan.ops.evaluate import content, evaluate
from foreplan.ops.expr import log
from foreplan.ops.map import elementwise
from foreplan.ops.norm.batch import BatchNormTrain
from foreplan.ops.shape import broadcast_to


def test_nodes_are_computed_in_order_and_nothing_large_is() -> None:
    b = GraphBuilder()
    x = b.store("x", TensorType(as_dtype("float32"), (3,)), Kind.CONSTANT, Array(np.arange(3, dtype=np.float32)))
    doubled = elementwise(b, lambda x: x * 2.0, x)
    spread = broadcast_to(b, doubled, (1 << 20, 3))
    known = {x: content(x)}
    assert not evaluate(b.nodes, known, 1 << 20) and spread not in known
    np.testing.assert_array_equal(known[doubled], [0, 2, 4])


def test_what_has_no_kernel_is_computed_by_its_parts() -> None:
    b = GraphBuilder()
    array = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    one, zero = (np.full(3, number, np.float32) for number in (1, 0))
    values = [
        b.store(name, TensorType(as_dtype("float32"), held.shape), Kind.CONSTANT, Array(held))
        for name, held in (("x", array), ("scale", one), ("bias", zero))
    ]
    y, mean, variance = b.node(BatchNormTrain(0.0), *values)
    known = {value: content(value) for value in values}
    assert evaluate(b.nodes, known, 1 << 20)
    np.testing.assert_allclose(known[mean], array.mean((0, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(known[variance], array.var((0, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(known[y].std((0, 2)), 1, rtol=1e-5)


def test_infinities_are_results_whatever_numpy_was_told() -> None:
    b = GraphBuilder()
    zero = b.store("zero", TensorType(as_dtype("float32"), (1,)), Kind.CONSTANT, Array(np.zeros(1, np.float32)))
    found = elementwise(b, lambda x: log(x), zero)
    known = {zero: content(zero)}
    with np.errstate(all="raise"):
        assert evaluate(b.nodes, known, 1 << 20)
    np.testing.assert_array_equal(known[found], [-np.inf])
