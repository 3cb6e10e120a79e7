"""Predicted times of single nodes beside those of a program."""

from __future__ import annotations

import pytest

import foreplan as fp
from foreplan import optim
from foreplan.graph import GraphBuilder, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.lower.node_times import NodeTimes
from foreplan.lower.targets import target_named
from foreplan.ops.collective import AllReduce


def test_nodes_take_what_their_actions_take() -> None:
    """Where every node becomes one action, and none needs a copy."""
    step = fp.differentiate(fp.models.build("mlp:width=64,layers=2,batch=8"), fp.losses.cross_entropy, optim.SGD(0.1))
    program = fp.lower(step, "numpy")
    wanted = {call.node: action.nanoseconds for action, call in zip(program.actions, program.calls, strict=True)}
    times = NodeTimes(target_named("numpy"))
    found = {node.name: times(node) for node in step.nodes}
    assert {name: time for name, time in found.items() if name in wanted} == wanted
    assert all(node.op.is_view and not found[node.name] for node in step.nodes if node.name not in wanted)


def test_nodes_without_a_kernel_take_what_their_parts_take() -> None:
    """Batch normalisation by the statistics of a batch has no kernel of its own on cards."""
    model = fp.models.build("resnet18:size=32,batch=2")
    step = fp.differentiate(model, fp.losses.cross_entropy, optim.SGD(0.1))
    node = next(each for each in step.nodes if each.op.name == "batch_norm_train")
    b = GraphBuilder()
    node.op.decompose(b, [b.input(value.name, value.type) for value in node.inputs])
    times = NodeTimes(target_named("cuda:h100"))
    assert len(b.nodes) > 1 and times(node) == sum(times(each) for each in b.nodes) > 0


def test_exchanges_take_what_links_take() -> None:
    """A sum over eight cards is scattered and gathered: all bytes but an eighth go out twice, and are added once."""
    b = GraphBuilder()
    x = b.input("x", TensorType(FLOAT32, (1 << 24,)))
    b.apply(AllReduce(8), x)
    (node,) = b.nodes
    fast, slow = (NodeTimes(target_named("cuda:h100"), links)(node) for links in ("900GB/s,0us", "9GB/s,0us"))
    sent = 2 * (1 << 26) * 7 // 8
    assert slow - fast == pytest.approx(sent / 9 - sent / 900, rel=0.01)
