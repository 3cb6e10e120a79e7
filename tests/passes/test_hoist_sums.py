"""Sums over the steps of a loop, taken behind it, in layers and drawn scans: beside the texts of `hoist_sums/`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import nn
from foreplan.graph import Graph, Node
from foreplan.ops.loop import Loop
from foreplan.ops.matmul import MatMul
from foreplan.passes.hoist_sums import hoist_sums
from foreplan.passes.loops import trim_loops, write_out_loops
from tests.profile import pairs, pick

KINDS = {"rnn": nn.rnn, "gru": nn.gru, "lstm": nn.lstm}


def loops(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, Loop)]


def sums_of_products(node: Node) -> int:
    """How many products of a loop's body have the form of a weight's gradient."""
    assert isinstance(node.op, Loop)
    return sum(isinstance(each.op, MatMul) and each.op.transpose_a for each in node.op.graph.nodes)


def evaluated(graph: Graph, target: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    return dict(fp.compile(graph, target=target).bind(seed=1).step(inputs).outputs)


def trained(graph: Graph, x: np.ndarray, target: str) -> dict[str, np.ndarray]:
    """The parameters after two steps."""
    session = fp.compile(graph, fp.losses.mean, fp.optim.Momentum(0.5, momentum=0.5), target=target).bind(seed=1)
    for _ in range(2):
        session.step({"x": x})
    return {name: np.array(value) for name, value in session.parameters.items()}


@pytest.mark.parametrize(
    ("kind", "target", "seed"), pairs(KINDS, ["numpy", "cpu:threads=1", "cpu:threads=2"], range(pick(1, 3, 12)))
)
def test_layers_learn_as_when_they_are_written_out(kind: str, target: str, seed: int) -> None:
    """Loops that are written out before differentiation have no sums that a pass could move."""
    rng = np.random.default_rng([seed, len(kind)])
    steps, items, inputs, width = (int(n) for n in rng.integers(1, [9, 20, 20, 20]))
    both, layers = bool(rng.integers(2)), int(rng.integers(1, 3))

    def model(x: Any) -> Any:
        y, _ = KINDS[kind](x, width, layers, bidirectional=both, name="layer")
        return y * y

    graph = fp.trace(model, fp.spec((items, steps, inputs)))
    x = rng.standard_normal((items, steps, inputs)).astype(np.float32)
    ours, theirs = trained(graph, x, target), trained(write_out_loops(graph), x, target)
    assert ours.keys() == theirs.keys() and len(ours) == 4 * layers * (1 + both)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("seed", range(pick(2, 4, 20)))
def test_cells_with_convolutions_and_tables_learn_as_when_they_are_written_out(seed: int, target: str) -> None:
    """Their weights' gradients are sums over the steps' images, and over the rows that the steps have read."""
    rng = np.random.default_rng(seed)
    steps, items, channels, size, words = (int(n) for n in rng.integers(2, 7, 5))

    def model(x: Any, words_read: Any) -> Any:
        def cell(carry: Any, xs: Any) -> Any:
            image, word = xs
            read = nn.embedding(word, words, channels, name="table")
            high = np.tanh(nn.conv(carry + image, channels, 3, padding=1, name="kernel") + read[:, :, None])
            return high, high

        return fp.scan(cell, np.zeros((items, channels, size)), (x, words_read))[1]

    graph = fp.trace(model, fp.spec((steps, items, channels, size)), fp.spec((steps, items), "int64"))
    x = rng.standard_normal((steps, items, channels, size)).astype(np.float32)
    read = rng.integers(0, words, (steps, items))
    found = []
    for each in (graph, write_out_loops(graph)):
        step = fp.compile(each, fp.losses.mean, fp.optim.SGD(0.5), target=target)
        session = step.bind(seed=1)
        for _ in range(2):
            session.step(dict(zip([value.name for value in each.inputs], (x, read))))
        found.append({name: np.array(value) for name, value in session.parameters.items()})
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("kind", "states"), [("rnn", 1), ("gru", 1), ("lstm", 2)])
def test_the_gradient_of_a_weight_is_one_product(kind: str, states: int) -> None:
    """Of the weight and its bias; the factors are histories, which results never overwrite, and results, of which one
    of a GRU takes the place of what its forward step kept.
    """
    graph = fp.trace(lambda x: KINDS[kind](x, 64, name="layer")[0], fp.spec((3, 5, 4)))
    _, backward = loops(fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1)).graph)
    assert backward.op.carries == states and not sums_of_products(backward)
    left_out = fp.passes.without("hoist_sums")
    _, backward = loops(fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), passes=left_out).graph)
    assert backward.op.carries == states + 2 and sums_of_products(backward) == 1


@pytest.mark.parametrize("seed", range(pick(2, 4, 20)))
def test_what_a_scan_adds_up(seed: int) -> None:
    """Products, sums along either axis and what is there itself, added to zeros and to other tensors."""
    rng = np.random.default_rng(seed)
    steps, rows, left, right = (int(n) for n in rng.integers(1, 9, 4))
    reverse = bool(rng.integers(2))

    def step(carry: Any, xs: Any) -> Any:
        product, columns, lines, parts, count = carry
        a, c = xs
        high = np.tanh(a)
        made = np.concatenate([high, c], 1)
        sums = (columns + a.sum(0), c.sum(1) + lines, parts + made[:, 1 : left + right], count + a[0, 0])
        return (product + high.T @ c, *sums), made

    def model(a: Any, c: Any, first: Any) -> Any:
        zeros = np.zeros((left, right), np.float32), np.zeros(left, np.float32), np.ones(rows, np.float32)
        carry = (*zeros, np.zeros((rows, left + right - 1), np.float32), a[0, 0, 0])
        (product, *others), made = fp.scan(step, (first + carry[0], *carry[1:]), (a, c), reverse=reverse)
        return {"product": product, **{f"sum{i}": x for i, x in enumerate(others)}, "made": made, "a": a * 2, "c": -c}

    shapes = {"a": (steps, rows, left), "c": (steps, rows, right), "first": (left, right)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    graph = fp.trace(model, *map(fp.spec, shapes.values()))
    a, c = (arrays[name].astype(np.float64) for name in "ac")
    made = np.concatenate([np.tanh(a), c], 2)
    expected = {
        "product": arrays["first"] + np.einsum("tri,trj->ij", np.tanh(a), c),
        "sum0": a.sum((0, 1)),
        "sum1": 1 + c.sum((0, 2)),
        "sum2": made[:, :, 1:].sum(0),
        "sum3": a[0, 0, 0] + a[:, 0, 0].sum(),
        "made": made,
    }
    (only,) = loops(trim_loops(hoist_sums(graph)))
    assert only.op.carries == 0 and not sums_of_products(only)
    for target in ("numpy", "cpu:threads=1"):
        found = evaluated(graph, target, **arrays)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
