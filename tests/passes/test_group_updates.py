"""Updates of small tensors that one op does: which, when, and that nothing changes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, Kind, Node, parse_graph
from foreplan.ops.multi_map import MultiMap
from foreplan.passes import group_updates
from foreplan.passes.group_updates import MOST, TOGETHER
from tests.ops.check import evaluate

RNG = np.random.default_rng(0)


def training(layers: int = 4, width: int = 8, optimizer: object = None) -> Graph:
    """A step of a net whose layers all have the same width."""

    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        for i in range(layers):
            x = fp.nn.relu(fp.nn.layer_norm(fp.nn.linear(x, width, name=f"layer{i}"), name=f"norm{i}"))
        return x

    chosen = optimizer or fp.optim.AdamW(1e-3)
    return fp.compile(fp.trace(model, fp.spec((4, width))), fp.losses.mse, chosen).graph  # type: ignore[arg-type]


def grouped(graph: Graph) -> Graph:
    return group_updates(graph, lambda op, inputs, outputs: True)


def groups(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, MultiMap)]


@pytest.mark.parametrize("optimizer", [fp.optim.AdamW(1e-3), fp.optim.Nesterov(0.1), fp.optim.SGD(0.1)])
def test_the_same_results_in_fewer_ops(optimizer: object) -> None:
    graph = training(optimizer=optimizer)
    after = grouped(graph)
    (node,) = groups(after)
    assert isinstance(node.op, MultiMap) and node.op.count == 12  # bias, scale and bias of four layers
    assert len(after.nodes) == len(graph.nodes) - 11
    inputs, stored = (
        {value.name: np.abs(0.1 * RNG.standard_normal(value.shape)).astype(value.dtype.numpy) for value in values}
        for values in (graph.inputs, graph.stored)
    )
    old, new = evaluate(graph, inputs, stored), evaluate(after, inputs, stored)
    for before, behind in zip(graph.results, after.results, strict=True):
        assert old[before].tobytes() == new[behind].tobytes(), before.name


def test_not_too_many_and_not_too_much_at_once() -> None:
    sizes = [node.op.count for node in groups(grouped(training(layers=30))) if isinstance(node.op, MultiMap)]
    assert sum(sizes) == 90 and max(sizes) == MOST
    for node in groups(grouped(training(layers=3, width=3000))):
        waiting = [x for x in node.inputs if not x.kind.is_stored]
        assert 12_000 < sum(x.type.nbytes for x in waiting) <= TOGETHER
    assert not groups(grouped(training(layers=2, width=5000)))


TEXT = """graph %g
input %x: float32[4]
parameter %p: float32[4] = fill(value=1.0)
parameter %q: float32[4] = fill(value=1.0)
parameter %r: float32[4] = fill(value=1.0)
%p.new: float32[4] = map(exprs=('(a0 - a1)',)) [%p, %x] as %p.new
%y: float32[4] = map(exprs=('(2.0 * a0)',)) [SEEN] as %y
%q.new: float32[4] = map(exprs=('(a0 - a1)',)) [%q, %y] as %q.new
%r.new: float32[4] = map(exprs=('(a0 - a1)',)) [%r, %x] as %r.new
update %p = %p.new
update %q = %q.new
update %r = %r.new
"""


def members(text: str) -> list[Sequence[str]]:
    """The stored tensors that each group updates."""
    found = groups(grouped(parse_graph(text)))
    return [[x.name for x in node.inputs if x.kind is Kind.PARAMETER] for node in found]


def test_what_is_read_before_the_group_runs_is_updated_by_itself() -> None:
    assert members(TEXT.replace("SEEN", "%x")) == [["p", "q", "r"]]
    assert members(TEXT.replace("SEEN", "%p")) == [["p", "q", "r"]]  # the old content
    assert members(TEXT.replace("SEEN", "%p.new")) == [["q", "r"]]


def test_what_a_formula_does_not_read_is_left_out() -> None:
    text = TEXT.replace("SEEN", "%x").replace("parameter", "input %rate: float32[]\nparameter", 1)
    (node,) = groups(grouped(parse_graph(re.sub(r"\[(%., %.)\] as (%.\.new)", r"[\1, %rate] as \2", text))))
    assert len(node.inputs) == 6


def test_where_there_is_no_kernel_nothing_is_done() -> None:
    graph = training()
    assert group_updates(graph, lambda op, inputs, outputs: False) is graph
