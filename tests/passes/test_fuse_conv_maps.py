"""Convolutions that take in what alone reads their results: which do, and that nothing changes."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, parse_graph
from foreplan.graph.types import DTYPES
from foreplan.ops.conv.mapped import ConvMap
from foreplan.passes import fuse_conv_maps, with_precision
from tests.ops.check import evaluate

RNG = np.random.default_rng(0)

CONV = "conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1))"
# A residual block: both of its paths end in normalisations, and their sum in a ReLU.
TEXT = f"""graph %g
input %x: float64[2,4,6,5]
parameter %v: float64[3,4,3,3] = fill(1.0)
parameter %w: float64[3,4,3,3] = fill(1.0)
parameter %c: float64[3] = fill(0.0)
parameter %s: float64[3] = fill(1.0)
parameter %b: float64[3] = fill(0.0)
buffer %m: float64[3] = fill(0.0)
buffer %q: float64[3] = fill(1.0)
%d: float64[2,3,6,5] = {CONV} [%x, %v] as %d
%dn: float64[2,3,6,5] = batch_norm(epsilon=1e-05) [%d, %s, %b, %m, %q] as %dn
%y: float64[2,3,6,5] = {CONV} [%x, %w, %c] as %y
%yn: float64[2,3,6,5] = batch_norm(epsilon=1e-05) [%y, %b, %s, %m, %q] as %yn
%z: float64[2,3,6,5] = map(exprs=('relu((a0 + a1))',)) [%dn, %yn] as %z
output %z = %z
"""


def fused(graph: Graph) -> dict[str, str]:
    """Names of fused convolutions, and what they do."""
    return {node.name: node.op.expr for node in graph.nodes if isinstance(node.op, ConvMap)}


@pytest.mark.parametrize(
    ("map", "exprs"),
    [
        ("map(exprs=('relu((a3 + a1))',)) [%x3, %dn, %x3, %yn]", 2),
        ("map(exprs=('relu((a1 * 2.0))',)) [%dn, %yn]", 2),
    ],
)
def test_what_a_map_does_not_read_is_left_out(map: str, exprs: int) -> None:
    text = TEXT.replace("map(exprs=('relu((a0 + a1))',)) [%dn, %yn]", map)
    text = text.replace("parameter %v", "input %x3: float64[2,3,6,5]\nparameter %v")
    graph = parse_graph(text)
    after = fuse_conv_maps(graph, lambda op, inputs, outputs: True)
    assert len(fused(after)) == exprs
    inputs = {"x": RNG.normal(size=(2, 4, 6, 5)), "x3": RNG.normal(size=(2, 3, 6, 5))}
    old, new = evaluate(graph, inputs, {}), evaluate(after, inputs, {})
    np.testing.assert_allclose(new[after.outputs["z"]], old[graph.outputs["z"]], rtol=1e-12)


def test_both_paths_of_a_residual_block() -> None:
    graph = parse_graph(TEXT)
    after = fuse_conv_maps(graph, lambda op, inputs, outputs: True)
    assert fused(after) == {
        "d/fused": "relu(((((a0 - a1) * a2) + a3) + a4))",
        "y/fused": "(((a0 - a1) * a2) + a3)",
    }
    assert not any(node.op.name in ("batch_norm", "conv") for node in after.nodes)
    assert [node.name for node in after.nodes if isinstance(node.op, ConvMap)] == ["y/fused", "d/fused"]
    inputs = {"x": RNG.normal(size=(2, 4, 6, 5))}
    stored = {v.name: RNG.uniform(0.5, 2, size=v.shape) for v in graph.stored}
    old, new = evaluate(graph, inputs, stored), evaluate(after, inputs, stored)
    np.testing.assert_allclose(new[after.outputs["z"]], old[graph.outputs["z"]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("output %z = %z", "output %z = %z\noutput %d = %d", {"y/fused"}),  # somebody else wants the convolution
        ("relu((a0 + a1))", "(relu(a0) + relu(a1))", {"d/fused", "y/fused"}),  # the normalisations alone
        ("relu((a0 + a1))", "(a0 * exp(a1))", {"d/fused", "y/fused"}),
    ],
)
def test_what_is_left_alone(old: str, new: str, left: set[str]) -> None:
    graph = parse_graph(TEXT.replace(old, new))
    after = fuse_conv_maps(graph, lambda op, inputs, outputs: True)
    assert set(fused(after)) == left
    if "exp" in new:
        assert fused(after)["y/fused"] == "(((a0 - a1) * a2) + a3)"
    assert fuse_conv_maps(graph, lambda op, inputs, outputs: False) is graph


def test_a_target_that_does_not_ask_for_it_gets_none() -> None:
    graph = fp.models.build("resnet18:batch=1,size=32")
    assert not any(call.op.name == "conv_map" for call in fp.lower(graph).calls)


def test_narrow_images_with_wide_vectors() -> None:
    """What widens and rounds between the nodes goes: one rounding is left, of at most 2^-8 of an element's size."""
    last = f"parameter %u: float64[3,3,3,3] = fill(1.0)\n%d: float64[2,3,6,5] = {CONV} [%x, %v] as %d"
    text = TEXT.replace(f"%d: float64[2,3,6,5] = {CONV} [%x, %v] as %d", last)
    text = text.replace("output %z = %z", f"%t: float64[2,3,6,5] = {CONV} [%z, %u] as %t\noutput %t = %t")
    graph = with_precision(parse_graph(text.replace("float64", "float32")), DTYPES["bfloat16"])
    after = fuse_conv_maps(graph, lambda op, inputs, outputs: True)
    assert fused(after) == {"d/fused": "relu(((((a0 - a1) * a2) + a3) + a4))", "y/fused": "(((a0 - a1) * a2) + a3)"}
    inputs = {"x": RNG.normal(size=(2, 4, 6, 5)).astype(np.float32)}
    stored = {v.name: RNG.uniform(0.5, 2, size=v.shape).astype(np.float32) for v in graph.stored}
    old, new = evaluate(graph, inputs, stored), evaluate(after, inputs, stored)
    (narrow,) = (value for node in after.nodes if node.name == "d/fused" for value in node.outputs)
    (before,) = (value for node in graph.nodes if node.name == "z" for value in node.outputs)
    assert str(narrow.dtype) == str(before.dtype) == "bfloat16"
    found, exact = new[narrow].astype(np.float64), old[before].astype(np.float64)
    # Unfused, a result is rounded four times on its way, and what is added may cancel.
    np.testing.assert_allclose(found, exact, rtol=4 * 2.0**-8, atol=4 * 2.0**-8 * np.abs(exact).max())
