"""The gradient of a concatenation, computed a part at a time."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Graph, parse_graph
from foreplan.ops.conv.ops import ConvDataGrad
from foreplan.passes import differentiate, fold_constants, share_common, split_gradients
from tests.ops.check import allocated_bytes, evaluate

RNG = np.random.default_rng(0)

TEXT = """graph %g
input %x: float64[2,3,5,4]
parameter %s: float64[1,3,1,1] = fill(1.0)
parameter %t: float64[1,3,1,1] = fill(1.0)
parameter %w: float64[7,6,3,3] = fill(0.5)
%a: float64[2,3,5,4] = map(exprs=('(a0 * a1)',)) [%x, %s] as %a
%b: float64[2,3,5,4] = map(exprs=('tanh((a0 * a1))',)) [%x, %t] as %b
%c: float64[2,6,5,4] = concat(axis=1) [%a, %b] as %c
%y: float64[2,7,5,4] = conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1)) [%c, %w] as %y
%z: float64[2,7,5,4] = map(exprs=('(a0 * a0)',)) [%y] as %z
%loss: float64[] = reduce(how='mean', axes=(0, 1, 2, 3)) [%z] as %loss
loss %loss
"""


def data_gradients(graph: Graph) -> list[tuple[int, ...]]:
    return [node.outputs[0].shape for node in graph.nodes if isinstance(node.op, ConvDataGrad)]


def test_each_part_of_a_concatenation_gets_its_own_gradient() -> None:
    before = share_common(differentiate(parse_graph(TEXT)))
    after = fold_constants(split_gradients(before))
    assert data_gradients(before) == [(2, 6, 5, 4)] and data_gradients(after) == [(2, 3, 5, 4)] * 2
    inputs = {"x": RNG.normal(size=(2, 3, 5, 4))}
    stored = {v.name: RNG.normal(size=v.shape) for v in before.parameters}
    old, new = evaluate(before, inputs, stored), evaluate(after, inputs, stored)
    assert set(before.gradients) == {"s", "t", "w"}
    for name, gradient in before.gradients.items():
        np.testing.assert_allclose(new[after.gradients[name]], old[gradient], rtol=1e-12)
    flops = [
        sum(n.op.cost([v.type for v in n.inputs], [v.type for v in n.outputs]).flops for n in g.nodes)
        for g in (before, after)
    ]
    assert flops[0] == flops[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"(a0 * a1)": "a0", "[%x, %s]": "[%x]"},
        {"loss %loss": "output %k = %c\nloss %loss", "concat(axis=1) [%a, %b]": "concat(axis=1) [%x, %b]"},
        {"[7,6,3,3]": "[6,2,3,3]", "[2,7,5,4]": "[2,6,5,4]", "dilations=(1, 1)": "dilations=(1, 1), groups=3"},
    ],
    ids=["one part", "one part is an input", "groups"],
)
def test_what_stays_whole(changes: dict[str, str]) -> None:
    text = TEXT
    for old, new in changes.items():
        text = text.replace(old, new)
    graph = share_common(differentiate(parse_graph(text)))
    assert split_gradients(graph) is graph


def test_weights_of_a_range_of_channels_are_not_copied() -> None:
    for kernel, pad in ((3, 1), (1, 0)):
        op = ConvDataGrad((1, 1), ((pad, pad),) * 2, (1, 1), spatial=(6, 6))
        g, w = np.ones((1, 128, 6, 6), np.float32), np.ones((128, 256, kernel, kernel), np.float32)
        part = w[:, 64:192]
        assert allocated_bytes(op, g, part) < part.nbytes // 2 and not part.flags.c_contiguous
