"""What a listed graph keeps alive, on graphs whose bytes are counted by hand."""

from __future__ import annotations

import pytest

import foreplan as fp
from foreplan.graph import parse_graph
from foreplan.passes.tile.live_bytes import live_bytes

ROW = 4 * 8  # bytes of float64[4]
HEAD = "graph %g\ninput %x: float64[2,4]\nparameter %w: float64[4,4] = fill(0.5)\n"
GRAPHS = {
    # x and the product; then the sum takes the product's bytes, as it may; then both die into a row.
    "in place": (
        "%p: float64[2,4] = matmul() [%x, %w] as %p\n%s: float64[2,4] = map(exprs=('tanh(a0)',)) [%p] as %s\n"
        "%y: float64[4] = reduce(how='sum', axes=(0,), keepdims=False, wide=False) [%s] as %y\noutput %y = %y\n",
        [4 * ROW, 2 * ROW, 3 * ROW],
    ),
    # What is read again later keeps its bytes.
    "read again": (
        "%p: float64[2,4] = matmul() [%x, %w] as %p\n%s: float64[2,4] = map(exprs=('tanh(a0)',)) [%p] as %s\n"
        "%y: float64[2,4] = map(exprs=('(a0 * a1)',)) [%s, %p] as %y\noutput %y = %y\n",
        [4 * ROW, 4 * ROW, 4 * ROW],
    ),
    # A view has no bytes, and keeps alive what it looks at.
    "view": (
        "%r: float64[1,4] = slice(starts=(0, 0), shape=(1, 4), steps=(1, 1)) [%x] as %r\n"
        "%p: float64[1,4] = matmul() [%r, %w] as %p\n%y: float64[1,4] = map(exprs=('tanh(a0)',)) [%p] as %y\n"
        "output %y = %y\n",
        [2 * ROW, 3 * ROW, ROW],
    ),
    # Parts lie in the whole from the start, and so the whole is there from its first part on.
    "parts in place": (
        "%p: float64[2,4] = matmul() [%x, %w] as %p\n%q: float64[2,4] = matmul() [%x, %w] as %q\n"
        "%y: float64[4,4] = concat(axis=0) [%p, %q] as %y\noutput %y = %y\n",
        [6 * ROW, 6 * ROW, 4 * ROW],
    ),
    # Parts that are not stretches of the whole are copied.
    "parts copied": (
        "%p: float64[2,4] = matmul() [%x, %w] as %p\n%q: float64[2,4] = matmul() [%x, %w] as %q\n"
        "%y: float64[2,8] = concat(axis=1) [%p, %q] as %y\noutput %y = %y\n",
        [4 * ROW, 6 * ROW, 8 * ROW],
    ),
}


@pytest.mark.parametrize(("text", "expected"), GRAPHS.values(), ids=GRAPHS)
def test_by_hand(text: str, expected: list[int]) -> None:
    assert live_bytes(parse_graph(HEAD + text)) == expected


@pytest.mark.parametrize(
    "name", ["vgg16:batch=4,size=64", "resnet18:batch=4,size=64", "bert_base:batch=2,seq=64,layers=2"]
)
def test_near_what_is_planned(name: str) -> None:
    """A plan may choose another order and has workspaces: it is an estimate."""
    graph = fp.models.build(name)
    step = fp.compile(graph)
    assert step.graph is not None
    transient = step.arena_bytes - step.memory.persistent - step.memory.workspace
    assert 0.8 * transient <= max(live_bytes(step.graph)) <= 1.3 * (transient + step.memory.workspace)
