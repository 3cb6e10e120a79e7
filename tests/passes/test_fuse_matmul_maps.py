"""Products that take in the one map that reads them: which do, and that nothing changes."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Graph, parse_graph
from foreplan.ops.matmul_map import MatMulMap
from foreplan.passes import fuse_matmul_maps
from tests.ops.check import evaluate

RNG = np.random.default_rng(0)

# A layer's gradient and the update of its weights by it, with momentum; and a layer with a bias.
UPDATE = "exprs=('(a0 - (a3 * ((0.9 * a2) + a1)))', '((0.9 * a2) + a1)')"
TEXT = f"""graph %g
input %x: float64[3,5]
input %dy: float64[3,8]
input %rate: float64[] = fill(1.0)
parameter %w: float64[5,8] = fill(1.0)
parameter %b: float64[8] = fill(0.0)
state %v: float64[5,8] = fill(2.0)
%p: float64[3,8] = matmul() [%x, %w] as %p
%y: float64[3,8] = map(exprs=('relu((a1 + a0))',)) [%p, %b] as %y
%dw: float64[5,8] = matmul(transpose_a=True) [%x, %dy] as %dw
%w1: float64[5,8], %v1: float64[5,8] = map({UPDATE}) [%w, %dw, %v, %rate] as %u
update %w = %w1
update %v = %v1
output %y = %y
"""


def fused(graph: Graph) -> dict[str, MatMulMap]:
    return {node.name: node.op for node in graph.nodes if isinstance(node.op, MatMulMap)}


def after(text: str) -> Graph:
    return fuse_matmul_maps(parse_graph(text), lambda op, inputs, outputs: True)


def test_an_update_and_a_bias() -> None:
    graph = parse_graph(TEXT)
    found = after(TEXT)
    assert fused(found) == {
        "y": MatMulMap(("relu((a1 + a0))",)),
        "u": MatMulMap(("(a1 - (a3 * ((0.9 * a2) + a0)))", "((0.9 * a2) + a0)"), True, False),
    }
    assert len(found.nodes) == 2
    assert [value.name for value in found.updates] == ["w", "v"]
    inputs = {"x": RNG.normal(size=(3, 5)), "dy": RNG.normal(size=(3, 8)), "rate": np.float64(0.5)}
    stored = {v.name: RNG.normal(size=v.shape) for v in graph.stored}
    old, new = evaluate(graph, inputs, stored), evaluate(found, inputs, stored)
    for before, now in ((graph.outputs["y"], found.outputs["y"]), *zip(graph.updates.values(), found.updates.values())):
        np.testing.assert_allclose(new[now], old[before], rtol=1e-12, atol=1e-12)


def test_what_a_map_does_not_read_is_left_out() -> None:
    text = TEXT.replace(
        "map(exprs=('relu((a1 + a0))',)) [%p, %b]", "map(exprs=('relu((a3 + a1))',)) [%dy, %p, %dy, %b]"
    )
    found = after(text)
    assert fused(found)["y"] == MatMulMap(("relu((a1 + a0))",))
    inputs = {"x": RNG.normal(size=(3, 5)), "dy": RNG.normal(size=(3, 8)), "rate": np.float64(0.5)}
    graph = parse_graph(text)
    old, new = evaluate(graph, inputs, {}), evaluate(found, inputs, {})
    np.testing.assert_allclose(new[found.outputs["y"]], old[graph.outputs["y"]], rtol=1e-12)


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("output %y = %y", "output %y = %y\noutput %p = %p", {"u"}),  # somebody else wants the product
        ("output %y = %y", "output %y = %y\noutput %dw = %dw", {"y"}),
        ("x: float64[3,5]", "x: float64[9,5]", {"y"}),  # x is larger than the gradient, and would have to live on
    ],
)
def test_what_is_left_alone(old: str, new: str, left: set[str]) -> None:
    text = TEXT.replace(old, new)
    if "[9,5]" in new:
        text = text.replace("[3,8]", "[9,8]")
    assert set(fused(after(text))) == left


RESIDUAL = """graph %g
input %x: float64[2,3,50]
parameter %w: float64[50,8] = fill(1.0)
parameter %b: float64[8] = fill(0.0)
parameter %c: float64[3,8] = fill(0.0)
FIRST%p: float64[2,3,8] = matmul() [%x, %w] as %p
LAST%y: float64[2,3,8] = map(exprs=('(a2 + (a0 + a1))',)) [%p, %b, %r] as %y
output %y = %y
"""


def test_what_is_added_is_there_when_the_product_is_made() -> None:
    """However large its operands are: the product runs no later than before."""
    made = "%r: float64[3,8] = map(exprs=('(a0 * 2.0)',)) [%c] as %r\n"
    first = RESIDUAL.replace("FIRST", made).replace("LAST", "")
    assert set(fused(after(first))) == {"y"}
    assert not fused(after(RESIDUAL.replace("FIRST", "").replace("LAST", made)))


def test_updates_come_behind_what_still_reads_the_weights() -> None:
    """The data's gradient is fused with a map that stands behind the update, and would read what is overwritten."""
    product = "%dx: float64[3,5] = matmul(transpose_b=True) [%dy, %w] as %dx\n%w1:"
    text = TEXT.replace("%w1:", product, 1)
    text = text.replace("update %w = ", "%z: float64[3,5] = map(exprs=('(a0 * 2.0)',)) [%dx] as %z\nupdate %w = ")
    text = text.replace("output %y = %y", "output %y = %y\noutput %z = %z")
    wide = text.translate({ord("5"): "8", ord("8"): "5"})  # the data is larger than the cotangents, which may live on
    assert [node.name for node in after(wide).nodes] == ["y", "z", "u"]


def test_what_has_no_kernel_is_left_alone() -> None:
    graph = parse_graph(TEXT)
    assert fuse_matmul_maps(graph, lambda op, inputs, outputs: False) is graph
