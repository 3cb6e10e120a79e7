"""Folding, sharing and fusing: text in, text out."""

from __future__ import annotations

import numpy as np

from foreplan.graph import Graph, parse_graph
from foreplan.passes import fold_constants, fuse_maps, share_common
from tests.ops.check import evaluate

HEAD = """graph %g
input %x: float32[2,3]
parameter %w: float32[2,3] = fill(2.0)
"""


def nodes(graph: Graph) -> list[str]:
    return [line for line in graph.as_text().splitlines() if "]" in line and " as %" in line]


def same_results(before: Graph, after: Graph) -> None:
    inputs = {"x": np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)}
    old, new = evaluate(before, inputs), evaluate(after, inputs)
    for name, value in before.outputs.items():
        np.testing.assert_array_equal(old[value], new[after.outputs[name]])


def test_a_chain_becomes_one_map() -> None:
    graph = parse_graph(
        HEAD
        + """%a: float32[2,3] = map(exprs=('(a0 * a1)',)) [%x, %w] as %a
%b: float32[2,3] = map(exprs=('tanh(a0)',)) [%a] as %b
%c: float32[2,3] = map(exprs=('(a0 + a1)',)) [%b, %x] as %c
output %y = %c
"""
    )
    fused = fuse_maps(graph)
    assert nodes(fused) == [
        "%c/fused: float32[2,3] = map(exprs=('(tanh((a0 * a1)) + a0)',)) [%x, %w] as %c/fused",
    ]
    same_results(graph, fused)


def test_a_diamond_inside_one_reader_is_fused_and_computed_once() -> None:
    graph = parse_graph(
        HEAD
        + """%a: float32[2,3] = map(exprs=('exp(a0)',)) [%x] as %a
%b: float32[2,3] = map(exprs=('(a0 + 1.0)',)) [%a] as %b
%c: float32[2,3] = map(exprs=('(a0 / a1)',)) [%a, %b] as %c
output %y = %c
"""
    )
    fused = fuse_maps(graph)
    assert nodes(fused) == ["%c/fused: float32[2,3] = map(exprs=('(exp(a0) / (exp(a0) + 1.0))',)) [%x] as %c/fused"]
    (node,) = fused.nodes
    assert node.op.cost([node.inputs[0].type], [node.outputs[0].type]).flops == 3 * 6
    same_results(graph, fused)


def test_what_somebody_else_reads_is_not_fused() -> None:
    text = (
        HEAD
        + """%a: float32[2,3] = map(exprs=('exp(a0)',)) [%x] as %a
%b: float32[2,3] = map(exprs=('(a0 + 1.0)',)) [%a] as %b
output %a = %a
output %y = %b
"""
    )
    assert fuse_maps(parse_graph(text)).as_text() == text


def test_a_smaller_shape_is_not_fused_into_a_larger() -> None:
    text = """graph %g
input %x: float32[2,3]
parameter %w: float32[3] = fill(2.0)
%a: float32[3] = map(exprs=('exp(a0)',)) [%w] as %a
%b: float32[2,3] = map(exprs=('(a0 + a1)',)) [%x, %a] as %b
output %y = %b
"""
    assert fuse_maps(parse_graph(text)).as_text() == text


def test_forward_and_backward_stay_apart() -> None:
    text = (
        HEAD
        + """%a: float32[2,3] = map(exprs=('exp(a0)',)) [%x] as %a
~%b: float32[2,3] = map(exprs=('(a0 + 1.0)',)) [%a] as %b
~%c: float32[2,3] = map(exprs=('exp(a0)',)) [%x] as %c
output %y = %b
output %z = %c
"""
    )
    assert share_common(fuse_maps(parse_graph(text))).as_text() == text


def test_equal_nodes_become_one() -> None:
    graph = parse_graph(
        HEAD
        + """%a: float32[2,3] = map(exprs=('exp(a0)',)) [%x] as %a
%b: float32[2,3] = map(exprs=('exp(a0)',)) [%x] as %b
%c: float32[2,3] = map(exprs=('(a0 * a1)',)) [%a, %b] as %c
output %y = %c
"""
    )
    shared = share_common(graph)
    assert [line.split(" = ")[1] for line in nodes(shared)] == [
        "map(exprs=('exp(a0)',)) [%x] as %a",
        "map(exprs=('(a0 * a1)',)) [%a, %a] as %c",
    ]
    same_results(graph, shared)


def test_small_constants_are_computed_at_once() -> None:
    graph = parse_graph(
        """graph %g
input %x: float32[2,3]
constant %k: float32[3] = array([1.0, 2.0, 3.0])
%a: float32[3] = map(exprs=('(a0 * 2.0)',)) [%k] as %a
%b: float32[2,3] = map(exprs=('(a0 + a1)',)) [%x, %a] as %b
output %y = %b
"""
    )
    folded = fold_constants(graph)
    assert "constant %a.folded: float32[3] = array([2.0, 4.0, 6.0])" in folded.as_text()
    assert "%k" not in folded.as_text()
    same_results(graph, folded)


def test_what_nobody_needs_is_left_out() -> None:
    graph = parse_graph(HEAD + "%a: float32[2,3] = map(exprs=('exp(a0)',)) [%x] as %a\noutput %y = %x\n")
    assert nodes(fold_constants(graph)) == []


def test_integers_are_folded_with_literals_that_are_none() -> None:
    graph = parse_graph(
        "graph %g\nconstant %c: int64[3] = array([1, 2, 3])\n"
        "%y: bool[3] = map(exprs=('(a0 < nan)',)) [%c] as %compare\noutput %y = %y\n"
    )
    (found,) = fold_constants(graph).stored
    assert str(found.init) == "array([False, False, False])"
