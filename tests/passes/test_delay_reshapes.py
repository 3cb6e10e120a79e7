"""Maps behind reshapes of products' rows, drawn and in traced models: beside the texts of `delay_reshapes/`."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import Tensor
from foreplan.graph import Graph, parse_graph
from foreplan.ops.map import Map
from foreplan.passes.delay_reshapes import delay_reshapes
from tests.passes.texts import hold_same
from tests.profile import pick

HEAD = """graph %g
input %x: float64[6,3]
input %r: float64[2,3,5]
input %c: float64[5]
input %n: float64[1,1,5]
input %o: float64[1,1]
input %t: float64[3,1]
input %s: float64[]
parameter %w: float64[3,5] = fill(0.5)
%p: float64[6,5] = matmul() [%x, %w] as %p
%v: float64[2,3,5] = reshape(shape=(2, 3, 5)) [%p] as %v
"""


def line(name: str, expr: str, *read: str) -> str:
    return f"%{name}: float64[2,3,5] = map(exprs=({expr!r},)) [{', '.join(f'%{each}' for each in read)}] as %{name}\n"


@pytest.mark.parametrize("seed", range(pick(20, 40, 1000)))
def test_drawn_maps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names, text = ["v", "v", "r", "c", "n", "o", "s", "t"], ""
    for i in range(int(rng.integers(1, 8))):
        read = ["v" if i == 0 else f"a{i - 1}", names[int(rng.integers(len(names)))]]
        text += line(f"a{i}", str(rng.choice(["a0 * a1", "tanh(a0) + a1", "a0 - a1"])), *read)
        names.append(f"a{i}")
    graph = parse_graph(HEAD + text + f"output %y = %{names[-1]}\n")
    after = delay_reshapes(graph)
    hold_same(graph, after, rng)
    assert sum(isinstance(node.op, Map) for node in after.nodes) == len(names) - 8


def test_a_bias_and_an_activation_behind_a_view_are_one_map() -> None:
    """As transformers' GPT-2 has them, in training too: one map of the product forward."""

    def model(x: Tensor) -> Tensor:
        rows = fp.nn.linear(x.reshape(12, 8), 16, name="linear")
        return np.tanh(rows.reshape(3, 4, 16)) * 2

    graph = fp.trace(model, fp.spec((3, 4, 8)))
    for step in (fp.compile(graph, target="numpy"), fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1))):
        forward: Graph = step.graph
        found = [node for node in forward.nodes if isinstance(node.op, Map) and "tanh" in node.op.exprs[0]]
        assert found[0].outputs[0].shape == (12, 16) and len(found[0].inputs) == 2
