"""Loops written out and trimmed, by compilation: beside the texts of `write_out_loops/` and `trim_loops/`."""

from __future__ import annotations

from typing import Any

import numpy as np

import foreplan as fp
from foreplan import nn
from foreplan.graph import Graph, Node
from foreplan.ops.loop import Loop
from foreplan.passes.loops import write_out_loops

STEPS, ITEMS, SIZE = 5, 2, 4


def cell(carry: Any, x: Any) -> Any:
    """A step with a carry that only itself reads, and an output of no interest."""
    h, idle = carry
    h = np.tanh(nn.linear(h, SIZE, name="state") + x)
    return (h, idle * 2.0 + x), (h, h * idle)


def model(x: Any) -> Any:
    (h, _), (ys, _) = fp.scan(cell, (np.zeros((ITEMS, SIZE)), np.ones((ITEMS, SIZE))), x)
    return h + ys[0]


def traced() -> Graph:
    return fp.trace(model, fp.spec((STEPS, ITEMS, SIZE)))


def loops(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, Loop)]


def test_nothing_is_kept_for_a_gradient_that_nobody_asks_for() -> None:
    head = fp.trace(lambda x: nn.linear(model(fp.stop_gradient(x)), 1, name="head"), fp.spec((STEPS, ITEMS, SIZE)))
    step = fp.compile(head, fp.losses.mean, fp.optim.SGD(0.1), freeze=["state"])
    (only,) = loops(step.graph)
    assert only.op.kept == 0 and len(only.outputs) == 2


def test_written_out_loops_have_lines_of_the_user() -> None:
    assert all(node.source.startswith("test_loops.py:") for node in write_out_loops(traced()).nodes)


def test_loops_are_written_out_for_narrow_types_and_for_cards() -> None:
    graph = traced()
    assert [only.op.carries for only in loops(fp.compile(graph).graph)] == [1]
    for options in ({"precision": "bf16"}, {"target": "cuda:h100"}):
        step = fp.compile(graph, **options)
        assert not loops(step.graph) and not any(call.op.name == "loop" for call in step.program.calls)
    staged = fp.lower(fp.differentiate(graph, fp.losses.mean, fp.optim.SGD(0.1)), "cuda:h100")
    assert not any(call.op.name == "loop" for call in staged.calls)
