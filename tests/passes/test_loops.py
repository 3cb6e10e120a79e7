"""Loops written out, and loops that compute only what is read."""

from __future__ import annotations

from typing import Any

import numpy as np

import foreplan as fp
from foreplan import nn
from foreplan.graph import Graph, Node
from foreplan.ops.loop import Loop
from foreplan.passes.loops import trim_loops, write_out_loops

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


def result(graph: Graph, **options: Any) -> Any:
    x = np.random.default_rng(0).standard_normal((STEPS, ITEMS, SIZE)).astype(np.float32)
    return fp.compile(graph, **options).bind(seed=1).step({"x": x})


def test_what_nobody_reads_is_left_out() -> None:
    graph = traced()
    (before,), (after,) = loops(graph), loops(trim_loops(graph))
    assert (before.op.carries, len(before.outputs)) == (2, 4)
    assert (after.op.carries, len(after.outputs)) == (1, 2)
    assert len(after.op.graph.nodes) < len(before.op.graph.nodes)
    assert loops(fp.compile(graph).graph)[0].op.carries == 1
    assert trim_loops(trim_loops(graph)).as_text() == trim_loops(graph).as_text()
    theirs = result(write_out_loops(graph)).outputs["output"]
    assert np.array_equal(result(graph).outputs["output"], theirs)


def test_nothing_is_kept_for_a_gradient_that_nobody_asks_for() -> None:
    head = fp.trace(lambda x: nn.linear(model(fp.stop_gradient(x)), 1, name="head"), fp.spec((STEPS, ITEMS, SIZE)))
    step = fp.compile(head, fp.losses.mean, fp.optim.SGD(0.1), freeze=["state"])
    (only,) = loops(step.graph)
    assert only.op.kept == 0 and len(only.outputs) == 2


def test_written_out_loops_have_a_node_a_step_and_lines_of_the_user() -> None:
    graph = write_out_loops(traced())
    assert not loops(graph)
    assert [node.op.name for node in graph.nodes].count("matmul") == STEPS
    assert all(node.source.startswith("test_loops.py:") for node in graph.nodes)


def test_loops_are_written_out_for_narrow_types_and_for_cards() -> None:
    graph = traced()
    assert loops(fp.compile(graph).graph)
    for options in ({"precision": "bf16"}, {"target": "cuda:h100"}):
        step = fp.compile(graph, **options)
        assert not loops(step.graph) and not any(call.op.name == "loop" for call in step.program.calls)
    staged = fp.lower(fp.differentiate(graph, fp.losses.mean, fp.optim.SGD(0.1)), "cuda:h100")
    assert not any(call.op.name == "loop" for call in staged.calls)


def test_loops_within_loops_are_written_out() -> None:
    def outer(x: Any) -> Any:
        def rows(c: Any, row: Any) -> Any:
            inner, _ = fp.scan(lambda d, e: (d * 0.5 + e, None), c, row)
            return inner, inner

        return fp.scan(rows, x[0, 0], x)[1]

    graph = fp.trace(outer, fp.spec((3, 4, 2)))
    x = np.random.default_rng(0).standard_normal((3, 4, 2)).astype(np.float32)
    ours, theirs = (fp.compile(g).bind().step({"x": x}).outputs["output"] for g in (graph, write_out_loops(graph)))
    assert np.array_equal(ours, theirs)
