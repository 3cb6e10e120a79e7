"""A dominant activation between two convolutions, made and used a range of channels at a time."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, parse_graph
from foreplan.passes import split_channels
from tests.ops.check import evaluate
from tests.passes.steps import training_step

RNG = np.random.default_rng(0)

TEXT = """graph %g
input %x: float64[2,1,6,5]
parameter %v: float64[10,1,3,3] = fill(1.0)
parameter %c: float64[10] = fill(0.0)
parameter %s: float64[1] = fill(0.5)
parameter %w: float64[5,10,3,3] = fill(1.0)
parameter %d: float64[5] = fill(0.0)
%a: float64[2,10,6,5] = conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1)) [%x, %v, %c] as %a
%b: float64[2,10,6,5] = map(exprs=('tanh((a0 * a1))',)) [%a, %s] as %b
%y: float64[2,5,6,5] = conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1)) [%b, %w, %d] as %y
%z: float64[2,5,6,5] = map(exprs=('(a0 * a0)',)) [%y] as %z
%loss: float64[] = reduce(how='mean', axes=(0, 1, 2, 3)) [%z] as %loss
loss %loss
"""


def made(graph: Graph) -> set[tuple[int, ...]]:
    return {value.shape for node in graph.nodes if not node.op.is_view for value in node.outputs}


def unsplit(graph: Graph) -> Graph:
    return training_step(graph, without=("split_channels",))


def test_neither_the_activation_nor_its_gradient_is_ever_whole() -> None:
    graph = parse_graph(TEXT)
    after, before = training_step(graph), unsplit(graph)
    assert (2, 10, 6, 5) in made(before) and (2, 10, 6, 5) not in made(after)
    inputs = {"x": RNG.normal(size=(2, 1, 6, 5))}
    stored = {v.name: RNG.normal(size=v.shape) for v in graph.parameters}
    old, new = evaluate(before, inputs, stored), evaluate(after, inputs, stored)
    assert before.loss is not None and after.loss is not None
    np.testing.assert_allclose(new[after.loss], old[before.loss], rtol=1e-12)
    assert set(before.gradients) == {"v", "c", "s", "w", "d"}
    for name, gradient in before.gradients.items():
        np.testing.assert_allclose(new[after.gradients[name]], old[gradient], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss %loss": "output %k = %b\nloss %loss"},
        {"[%y] as %z": "[%y] as %z\n%q: float64[] = reduce(how='sum', axes=(0, 1, 2, 3)) [%b] as %q"}
        | {"loss %loss": "output %k = %q\nloss %loss"},
        {"float64[2,1,6,5]": "float64[2,8,6,5]", "[10,1,3,3]": "[10,8,3,3]"},
        {
            "[5,10,3,3]": "[5,5,3,3]",
            "[2,5,6,5]": "[2,5,6,5]",
            "dilations=(1, 1)) [%b": "dilations=(1, 1), groups=2) [%b",
        },
    ],
    ids=["it is an output", "another reads it", "dear to make again", "groups"],
)
def test_what_stays_whole(changes: dict[str, str]) -> None:
    text = TEXT
    for old, new in changes.items():
        text = text.replace(old, new)
    if "groups" in text:
        text = (
            text.replace("[5,5,3,3]", "[4,5,3,3]").replace("[2,5,6,5]", "[2,4,6,5]").replace("float64[5]", "float64[4]")
        )
    graph = parse_graph(text)
    assert split_channels(graph) is graph


@pytest.mark.thorough
def test_the_chain_fits_where_whole_operations_would_not() -> None:
    # The first convolution's output and its gradient take 1,024 MiB each, whole.
    step = fp.compile(fp.models.build("conv_chain"), loss=fp.losses.mean, optimizer=fp.optim.Nesterov(0.1), remat="off")
    flops = sum(step.program.actions[s.action].flops for s in step.plan.steps)
    found = fp.plan(step.program, budget="1100MiB")
    assert found.arena_bytes <= 1100 << 20
    assert sum(step.program.actions[s.action].flops for s in found.steps) <= 1.01 * flops
