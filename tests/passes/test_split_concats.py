"""A convolution over concatenated channels, added up over what was concatenated."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, parse_graph
from foreplan.ops.conv.ops import ConvDataGrad
from foreplan.passes import split_concats
from tests.ops.check import allocated_bytes, evaluate
from tests.passes.steps import training_step

RNG = np.random.default_rng(0)

CONV = "conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1))"
TEXT = f"""graph %g
input %x: float64[2,16,6,5]
input %y: float64[2,20,6,5]
parameter %v: float64[18,20,3,3] = fill(1.0)
parameter %w: float64[3,34,3,3] = fill(1.0)
parameter %d: float64[3] = fill(0.0)
%u: float64[2,18,6,5] = {CONV} [%y, %v] as %u
%c: float64[2,34,6,5] = concat(axis=1) [%u, %x] as %c
%z: float64[2,3,6,5] = {CONV} [%c, %w, %d] as %z
%s: float64[2,3,6,5] = map(exprs=('(a0 * a0)',)) [%z] as %s
%loss: float64[] = reduce(how='mean', axes=(0, 1, 2, 3)) [%s] as %loss
loss %loss
"""


def made(graph: Graph) -> set[tuple[int, ...]]:
    return {value.shape for node in graph.nodes if not node.op.is_view for value in node.outputs}


def test_neither_the_concatenation_nor_its_gradient_is_ever_made() -> None:
    graph = parse_graph(TEXT)
    after, before = training_step(graph), training_step(graph, without=("split_concats",))
    assert (2, 34, 6, 5) in made(before) and (2, 34, 6, 5) not in made(after)
    inputs = {"x": RNG.normal(size=(2, 16, 6, 5)), "y": RNG.normal(size=(2, 20, 6, 5))}
    stored = {v.name: RNG.normal(size=v.shape) for v in graph.parameters}
    old, new = evaluate(before, inputs, stored), evaluate(after, inputs, stored)
    assert before.loss is not None and after.loss is not None
    np.testing.assert_allclose(new[after.loss], old[before.loss], rtol=1e-12)
    assert set(before.gradients) == {"v", "w", "d"}
    for name, gradient in before.gradients.items():
        np.testing.assert_allclose(new[after.gradients[name]], old[gradient], rtol=1e-11, atol=1e-13)


def test_what_is_made_first_is_added_first() -> None:
    graph = split_concats(parse_graph(TEXT))
    parts = [node.inputs[0].name for node in graph.nodes if node.name == "z/part" or node.name.startswith("z/part.")]
    assert parts == ["x", "u"]  # an input of the step is there before anything is made


@pytest.mark.parametrize(
    "changes",
    [
        {"loss %loss": "output %k = %c\nloss %loss"},
        {"loss %loss": "%q: float64[] = reduce(how='sum', axes=(0, 1, 2, 3)) [%c] as %q\noutput %k = %q\nloss %loss"},
        {"float64[3,34,3,3]": "float64[4,17,3,3]", "dilations=(1, 1)) [%c": "dilations=(1, 1), groups=2) [%c"}
        | {"[2,3,6,5]": "[2,4,6,5]", "float64[3]": "float64[4]"},
        {"[2,16,6,5]": "[2,15,6,5]", "34": "33"},
        {"concat(axis=1) [%u, %x]": "concat(axis=2) [%u, %u]", "[2,34,6,5]": "[2,18,12,5]", "[3,34,3,3]": "[3,18,3,3]"}
        | {"[2,3,6,5]": "[2,3,12,5]"},
    ],
    ids=["it is an output", "another reads it", "groups", "few channels", "not channels"],
)
def test_what_stays_concatenated(changes: dict[str, str]) -> None:
    text = TEXT
    for old, new in changes.items():
        text = text.replace(old, new)
    graph = parse_graph(text)
    assert split_concats(graph) is graph


def test_unet_concatenates_nothing() -> None:
    graph = fp.models.build("unet:batch=2,size=16,width=16")
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1))
    assert any(node.op.name == "concat" for node in graph.nodes)
    images = [call for call in step.program.calls if call.op.name == "concat" and call.outputs[0].type.shape[0] == 2]
    assert not images


def test_weights_of_a_range_of_channels_are_not_copied() -> None:
    for kernel, pad in ((3, 1), (1, 0)):
        op = ConvDataGrad((1, 1), ((pad, pad),) * 2, (1, 1), spatial=(6, 6))
        g, w = np.ones((1, 128, 6, 6), np.float32), np.ones((128, 256, kernel, kernel), np.float32)
        part = w[:, 64:192]
        assert allocated_bytes(op, g, part) < part.nbytes // 2 and not part.flags.c_contiguous
