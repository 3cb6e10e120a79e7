"""Another number of samples for a model: as if it had been made for that many, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import foreplan as fp
from foreplan import nn, spec, trace
from foreplan.graph import Graph, parse_graph
from foreplan.graph.ir import live_nodes
from foreplan.passes import resized

MODELS = [
    "resnet18:size=32,batch={}",
    "vit_b16:size=32,layers=1,width=48,heads=4,batch={}",
    "swin_t:size=64,batch={}",
    "efficientnet_b0:size=32,batch={}",
    "gpt2_small:seq=8,layers=1,width=16,heads=2,vocabulary=20,dropout=0.1,batch={}",
    "t5_small:layers=1,batch={}",
    "bert_base:seq=8,layers=1,width=16,heads=2,vocabulary=20,batch={}",
    "lstm_lm:seq=4,width=8,vocabulary=20,batch={}",
    "ddpm_unet:batch={}",
    "dlrm:batch={}",
]


def with_samples(graph: Graph, count: int) -> Graph:
    return resized(graph, {value.name: (count, *value.shape[1:]) for value in graph.inputs})


def lines(graph: Graph) -> list[str]:
    """What a graph computes its results from, one line each."""
    alive = replace(graph, nodes=tuple(live_nodes(graph, graph.results)))
    return sorted(alive.as_text().splitlines())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_models_of_the_zoo_are_those_of_that_batch(name: str, count: int) -> None:
    found = with_samples(fp.models.build(name.format(4)), count)
    assert lines(found) == lines(fp.models.build(name.format(count)))


def test_a_text_before_and_a_text_after() -> None:
    before = """
graph %g
input %x: float32[4,3,2]
parameter %w: float32[2,5] = normal(std=1.0)
parameter %first: float32[1,1,5] = normal(std=1.0)
%y: float32[4,3,5] = matmul() [%x, %w] as %y
%b: float32[4,1,5] = broadcast(shape=(4, 1, 5)) [%first] as %b
%c: float32[4,4,5] = concat(axis=1) [%b, %y] as %c
%r: float32[16,5] = reshape(shape=(16, 5)) [%c] as %r
%s: float32[4,4,5] = reshape(shape=(4, 4, 5)) [%r] as %s
%t: float32[4,1,5] = slice(starts=(0, 2, 0), shape=(4, 1, 5), steps=(1, 1, 1)) [%s] as %t
output %t = %t
"""
    graph = parse_graph(before)
    text = resized(graph, {"x": (6, 3, 2)}).as_text()
    after = [
        "input %x: float32[6,3,2]",
        "%b: float32[6,1,5] = broadcast(shape=(6, 1, 5)) [%first] as %b",
        "%r: float32[24,5] = reshape(shape=(24, 5)) [%c] as %r",
        "%s: float32[6,4,5] = reshape(shape=(6, 4, 5)) [%r] as %s",
        "%t: float32[6,1,5] = slice(starts=(0, 2, 0), shape=(6, 1, 5), steps=(1, 1, 1)) [%s] as %t",
    ]
    assert all(line in text.splitlines() for line in after), text
    assert text == parse_graph(text).as_text()


X = spec((6, 4))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: x.sum(0), "no axis of the result 'reduce'"),
        (lambda x: x @ x.T, r"'matmul' .* reads all of 'x' \(float32\[6,4\]\) for one sample"),
        (lambda x: x - x.mean(0), "reads all of 'reduce' .* for one sample"),
        (lambda x: (x * x).sum(), "'reduce' is one number of all samples, and no mean over them"),
        (lambda x: x.reshape(3, 2, 4), "no axis of the result"),
        (lambda x: x.reshape(4, 6).T, "joins the samples with something else"),
        (lambda x: x[::-1], "the samples of .x. .* do not lie one behind the other along one axis"),
        (lambda x: np.cumsum(x, 0), "does not compute one sample by itself"),
        (lambda x: np.concatenate([x, x], 0)[3:9], "does not compute one sample|do not lie one behind the other"),
        (lambda x: x + np.arange(6, dtype=np.float32)[:, None], "'constant' .* has other numbers for each sample"),
        (lambda x: x * nn.parameter("w", (6, 1)), "the parameter 'w' .* has something for each sample"),
    ],
)
@pytest.mark.parametrize("count", [3, 9])
def test_samples_that_depend_on_others_are_refused(function: Callable[..., object], told: str, count: int) -> None:
    with pytest.raises(fp.UnsupportedError, match=f"made for 6 samples, cannot take {count} instead.*({told})"):
        resized(trace(function, X), {"x": (count, 4)})


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({"x": (3, 4)}, "the input 'm' .* has something for each sample, and stays as it was"),
        ({"x": (3, 4), "m": (2, 1)}, "do not have the same number of samples"),
        ({"x": (3, 5), "m": (3, 1)}, "differs from .* in more than the number of samples"),
    ],
)
def test_shapes_that_are_no_number_of_samples_are_refused(shapes: dict[str, tuple[int, ...]], told: str) -> None:
    graph = trace(lambda x, m: x * m, X, spec((6, 1)))
    with pytest.raises(fp.UnsupportedError, match=told):
        resized(graph, shapes)


def test_one_sample_shows_nothing() -> None:
    with pytest.raises(fp.UnsupportedError, match="does not show which axes are the batch's"):
        resized(trace(lambda x: x * 2.0, spec((1, 4))), {"x": (2, 4)})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: nn.relu(x) / x.shape[0],
        lambda x: np.tanh(x * (1 / x.shape[0])),
        lambda x: x.shape[0] * nn.linear(x, 3),
        lambda x: np.divide(x, np.float32(len(x))),
    ],
)
def test_a_number_that_may_be_that_of_the_samples_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(fp.UnsupportedError, match="scales by 6, which may be the number of samples"):
        resized(trace(function, X), {"x": (3, 4)})
    assert resized(trace(lambda x: nn.hard_swish(nn.gelu(x)) / 7 + 6, X), {"x": (3, 4)}).inputs[0].shape == (3, 4)


def test_the_axis_of_the_samples_is_that_of_the_inputs() -> None:
    graph = trace(lambda x: np.transpose(x, (1, 0, 2)).reshape(3, 10), spec((2, 3, 5)))
    assert resized(graph, {"x": (2, 7, 5)}).outputs["output"].shape == (7, 10)
    assert resized(graph, {"x": (4, 3, 5)}).outputs["output"].shape == (3, 20)
    with pytest.raises(fp.UnsupportedError, match="no axis of the result"):
        resized(trace(lambda x: nn.linear(x, 7), X), {"x": (6, 8)})


def test_a_mean_over_samples_is_of_any_number() -> None:
    graph = resized(trace(lambda x: (x * x).mean(), X), {"x": (2, 4)})
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert fp.compile(graph, target="numpy").bind().step({"x": x}).outputs["output"] == pytest.approx((x * x).mean())


def test_constants_that_are_the_same_for_each_sample_grow() -> None:
    graph = resized(trace(lambda x: np.concatenate([x, np.ones((6, 2), np.float32)], 1), X), {"x": (8, 4)})
    (y,) = fp.compile(graph, target="numpy").bind().step({"x": np.zeros((8, 4), np.float32)}).outputs.values()
    np.testing.assert_array_equal(y, np.pad(np.zeros((8, 4)), ((0, 0), (0, 2)), constant_values=1))
