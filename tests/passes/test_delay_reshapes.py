"""Maps behind reshapes of products' rows: which work on the rows, and that results stay."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import Tensor
from foreplan.graph import Graph, parse_graph
from foreplan.ops.map import Map
from foreplan.passes.delay_reshapes import delay_reshapes
from tests.ops.check import evaluate
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


def line(name: str, expr: str, *read: str, shape: str = "2,3,5") -> str:
    return f"%{name}: float64[{shape}] = map(exprs=({expr!r},)) [{', '.join(f'%{each}' for each in read)}] as %{name}\n"


def maps(text: str, head: str = HEAD) -> list[tuple[int, ...]]:
    """The shapes of the maps behind the pass, which is checked to keep all results."""
    graph = parse_graph(head + text)
    after = delay_reshapes(graph)
    rng = np.random.default_rng(0)
    inputs = {value.name: rng.standard_normal(value.shape) for value in graph.inputs}
    stored = {value.name: rng.standard_normal(value.shape) for value in graph.parameters}
    old, new = evaluate(graph, inputs, stored), evaluate(after, inputs, stored)
    for name, value in graph.outputs.items():
        assert (after.outputs[name].name, after.outputs[name].type) == (value.name, value.type)
        np.testing.assert_allclose(new[after.outputs[name]], old[value], rtol=1e-14, atol=1e-14)
    return [node.outputs[0].shape for node in after.nodes if isinstance(node.op, Map)]


@pytest.mark.parametrize("other", ["r", "c", "n", "o", "s"])
def test_maps_of_rows(other: str) -> None:
    """With operands of the whole shape, with one element for each column, and with one."""
    assert maps(line("a", "tanh(a0) * a1", "v", other) + "output %y = %a\n") == [(6, 5)]
    assert maps(line("a", "a1 - a0", other, "v") + "output %y = %a\n") == [(6, 5)]


def test_chains_and_values_that_are_read_twice() -> None:
    text = line("a", "tanh(a0)", "v") + line("b", "a0 * a1", "a", "v") + line("d", "a0 + a1", "b", "r")
    assert maps(text + "output %y = %d\noutput %z = %a\n") == [(6, 5)] * 3


def test_what_stays() -> None:
    assert maps(line("a", "a0 * a1", "v", "t") + "output %y = %a\n") == [(2, 3, 5)]  # one for each row of some
    assert maps(line("a", "a0 * a1", "r", "c") + "output %y = %a\n") == [(2, 3, 5)]  # no product's rows
    wide = HEAD.replace(
        "%v: float64[2,3,5] = reshape(shape=(2, 3, 5))", "%v: float64[2,5,3] = reshape(shape=(2, 5, 3))"
    )
    assert maps(line("a", "tanh(a0)", "v", shape="2,5,3") + "output %y = %a\n", wide) == [(2, 5, 3)]
    larger = HEAD.replace("%r: float64[2,3,5]", "%r: float64[4,2,3,5]")
    text = line("a", "a0 + a1", "v", "r", shape="4,2,3,5") + "output %y = %a\n"
    assert maps(text, larger) == [(4, 2, 3, 5)]


@pytest.mark.parametrize("seed", range(pick(20, 40, 1000)))
def test_drawn_maps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names, text = ["v", "v", "r", "c", "n", "o", "s", "t"], ""
    for i in range(int(rng.integers(1, 8))):
        read = ["v" if i == 0 else f"a{i - 1}", names[int(rng.integers(len(names)))]]
        text += line(f"a{i}", str(rng.choice(["a0 * a1", "tanh(a0) + a1", "a0 - a1"])), *read)
        names.append(f"a{i}")
    assert len(maps(text + f"output %y = %{names[-1]}\n")) == len(names) - 8


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
