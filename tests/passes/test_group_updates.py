"""Updates of small tensors that one op does, in whole steps: beside the texts of `group_updates/`."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, Node
from foreplan.ops.multi_map import MultiMap
from foreplan.passes.group_updates import MOST, TOGETHER, GroupUpdates
from tests.passes.texts import hold_same


def training(layers: int = 4, width: int = 8, optimizer: object = None) -> Graph:
    """A step of a net whose layers all have the same width."""

    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        for i in range(layers):
            x = fp.nn.relu(fp.nn.layer_norm(fp.nn.linear(x, width, name=f"layer{i}"), name=f"norm{i}"))
        return x

    chosen = optimizer or fp.optim.AdamW(1e-3)
    return fp.compile(fp.trace(model, fp.spec((4, width))), fp.losses.mse, chosen).graph  # type: ignore[arg-type]


def grouped(graph: Graph) -> Graph:
    return GroupUpdates(lambda op, inputs, outputs: True)(graph)


def groups(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, MultiMap)]


@pytest.mark.parametrize("optimizer", [fp.optim.AdamW(1e-3), fp.optim.Nesterov(0.1), fp.optim.SGD(0.1)])
def test_the_same_results_in_fewer_ops(optimizer: object) -> None:
    graph = training(optimizer=optimizer)
    after = grouped(graph)
    (node,) = groups(after)
    assert isinstance(node.op, MultiMap) and node.op.count == 12  # bias, scale and bias of four layers
    assert len(after.nodes) == len(graph.nodes) - 11
    hold_same(graph, after, np.random.default_rng(0), far=0.0)


def test_not_too_many_and_not_too_much_at_once() -> None:
    sizes = [node.op.count for node in groups(grouped(training(layers=30))) if isinstance(node.op, MultiMap)]
    assert sum(sizes) == 90 and max(sizes) == MOST
    for node in groups(grouped(training(layers=3, width=3000))):
        waiting = [x for x in node.inputs if not x.kind.is_stored]
        assert 12_000 < sum(x.type.nbytes for x in waiting) <= TOGETHER
    assert not groups(grouped(training(layers=2, width=5000)))
