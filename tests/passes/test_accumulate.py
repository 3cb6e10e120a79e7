"""Gradients added in place by the op that computes the last of them."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, parse_graph
from foreplan.passes import accumulate, differentiate, share_common
from tests.ops.check import evaluate

RNG = np.random.default_rng(0)

HEAD = """graph %g
input %x: float64[4,3]
input %i: int64[2]
parameter %w: float64[3,3] = fill(0.5)
~%a: float64[4,3] = map(exprs=('tanh(a0)',)) [%x] as %a
"""
SUM = "~%s: float64[{0}] = map(exprs=('(a0 + a1)',)) [%a, %b] as %s\noutput %y = %s\n"


def nodes(graph: Graph) -> list[str]:
    return [line for line in graph.as_text().splitlines() if " as %" in line]


def same_results(before: Graph, after: Graph) -> None:
    inputs = {"x": RNG.normal(size=(4, 3)), "i": np.array([2, 2])}
    inputs = {value.name: inputs[value.name] for value in before.inputs}
    old, new = evaluate(before, inputs), evaluate(after, inputs)
    for name, value in before.outputs.items():
        np.testing.assert_allclose(old[value], new[after.outputs[name]], rtol=1e-14)


@pytest.mark.parametrize("order", ["[%a, %b]", "[%b, %a]"])
def test_a_product_is_added_to_the_earlier_summand(order: str) -> None:
    text = HEAD + "~%b: float64[4,3] = matmul() [%x, %w] as %b\n" + SUM.format("4,3").replace("[%a, %b]", order)
    graph = parse_graph(text)
    after = passes.fold_constants(accumulate(graph))
    assert nodes(after) == [
        "~%a: float64[4,3] = map(exprs=('tanh(a0)',)) [%x] as %a",
        "~%b/added: float64[4,3] = matmul() [%x, %w, %a] as %b/added",
    ]
    same_results(graph, after)


def test_three_summands_are_added_one_after_the_other() -> None:
    text = (
        HEAD
        + """~%b: float64[4,3] = matmul() [%x, %w] as %b
~%s: float64[4,3] = map(exprs=('(a0 + a1)',)) [%a, %b] as %s
~%c: float64[4,3] = matmul(transpose_b=True) [%x, %w] as %c
~%t: float64[4,3] = map(exprs=('(a0 + a1)',)) [%s, %c] as %t
output %y = %t
"""
    )
    graph = parse_graph(text)
    after = passes.fold_constants(accumulate(graph))
    assert [line.rpartition("= ")[2] for line in nodes(after)[1:]] == [
        "matmul() [%x, %w, %a] as %b/added",
        "matmul(transpose_b=True) [%x, %w, %b/added] as %c/added",
    ]
    same_results(graph, after)


def test_a_scatter_is_added_to_a_matrix() -> None:
    text = HEAD + (
        "~%u: float64[2,3] = slice(starts=(0, 0), shape=(2, 3), steps=(1, 1)) [%a] as %u\n"
        "~%b: float64[4,3] = scatter_add(axis=0, shape=(4, 3)) [%i, %u] as %b\n"
    )
    graph = parse_graph(text + SUM.format("4,3"))
    after = passes.fold_constants(accumulate(graph))
    assert nodes(after)[-1].endswith("scatter_add(axis=0, shape=(4, 3)) [%i, %u, %a] as %b/added")
    same_results(graph, after)


def test_the_gradient_of_a_normalisation_is_added_to_that_along_the_residual() -> None:
    graph = parse_graph(
        HEAD
        + """parameter %v: float64[3] = fill(1.5)
%n: float64[4,3], %m: float64[4], %r: float64[4] = layer_norm(axis=1, epsilon=1e-05) [%x, %v] as %n
~%b: float64[4,3], %v1: float64[3], %v2: float64[3] = layer_norm_grad(axis=1) [%x, %v, %m, %r, %x] as %b
output %v1 = %v1
output %v2 = %v2
"""
        + SUM.format("4,3")
    )
    after = passes.fold_constants(accumulate(graph))
    assert nodes(after) == [
        "~%a: float64[4,3] = map(exprs=('tanh(a0)',)) [%x] as %a",
        "%n: float64[4,3], %m: float64[4], %r: float64[4] = layer_norm(axis=1, epsilon=1e-05) [%x, %v] as %n",
        "~%b/added.0: float64[4,3], %b/added.1: float64[3], %b/added.2: float64[3] = "
        "layer_norm_grad(axis=1) [%x, %v, %m, %r, %x, %a] as %b/added",
    ]
    assert [after.outputs[name].name for name in ("y", "v1", "v2")] == ["b/added.0", "b/added.1", "b/added.2"]
    same_results(graph, after)


def test_a_further_gradient_of_what_is_added_to_may_itself_be_added_to() -> None:
    text = """graph %g
input %x: float64[4,3]
input %i: int64[2]
input %u: float64[2]
input %m: float64[4]
input %d: float64[4]
parameter %w: float64[3] = fill(0.5)
~%a: float64[4,3] = map(exprs=('tanh(a0)',)) [%x] as %a
~%dx: float64[4,3], %dw: float64[3], %db: float64[3] = layer_norm_grad(axis=1, scaled=True) [%x, %w, %m, %d, %x] as %n
~%s: float64[4,3] = map(exprs=('(a0 + a1)',)) [%a, %dx] as %s
~%b: float64[3] = scatter_add(axis=0, shape=(3,)) [%i, %u] as %b
~%t: float64[3] = map(exprs=('(a0 + a1)',)) [%dw, %b] as %t
output %y = %s
output %z = %t
"""
    before = parse_graph(text)
    after = accumulate(before)
    assert [node.op.name for node in after.nodes] == ["map", "layer_norm_grad", "scatter_add"]
    inputs = {x.name: np.abs(RNG.normal(size=x.shape)) if x.dtype.is_float else np.array([2, 1]) for x in before.inputs}
    old, new = evaluate(before, inputs), evaluate(after, inputs)
    for name, value in before.outputs.items():
        np.testing.assert_allclose(old[value], new[after.outputs[name]], rtol=1e-12)


@pytest.mark.parametrize(
    "middle",
    [
        "~%b: float64[4,3] = map(exprs=('exp(a0)',)) [%x] as %b\n",
        "~%b: float64[4,3] = matmul() [%x, %w] as %b\noutput %z = %b\n",
        "~%b: float64[4,3] = matmul() [%x, %w] as %b\n~%c: float64[4,3] = map(exprs=('exp(a0)',)) [%b] as %c\n"
        "output %z = %c\n",
        "%b: float64[4,3] = matmul() [%x, %w] as %b\n",
        "parameter %v: float64[4,3] = fill(1.5)\nparameter %s0: float64[] = fill(1.0)\n"
        "~%c: float64[4,3], %b: float64[4,3] = "
        "rms_norm_grad(axis=0) [%x, %v, %s0, %a] as %c\noutput %z = %c\n",
    ],
    ids=["no op that accumulates", "returned", "read elsewhere", "forward", "another of its results"],
)
def test_what_stays_as_it_is(middle: str) -> None:
    body, _, end = middle.partition("output")
    tail = SUM.format("4,3") + (f"output{end}" if end else "")
    graph = parse_graph(HEAD + body + tail)
    assert accumulate(graph) is graph


def test_a_window_onto_something_larger_is_not_worth_copying() -> None:
    text = (
        HEAD
        + """~%l: float64[8,3] = concat(axis=0) [%a, %x] as %l
~%d: float64[4,3] = slice(starts=(0, 0), shape=(4, 3), steps=(1, 1)) [%l] as %d
~%b: float64[4,3] = matmul() [%x, %w] as %b
"""
        + SUM.format("4,3").replace("[%a, %b]", "[%d, %b]")
    )
    graph = parse_graph(text)
    assert accumulate(graph) is graph


@pytest.mark.parametrize(
    "name,added",
    [
        ("resnet18:batch=1,size=32,classes=3", "conv_data_grad"),
        ("bert_base:batch=1,seq=4,layers=1,width=8,heads=2,vocabulary=12", "matmul"),
        ("gpt2_small:batch=1,seq=4,layers=1,width=8,heads=2,vocabulary=12", "scatter_add"),
        ("gpt2_small:batch=1,seq=4,layers=2,width=8,heads=2,vocabulary=12", "layer_norm_grad"),
    ],
)
def test_zoo_models_keep_their_gradients(name: str, added: str) -> None:
    graph = parse_graph(fp.models.build(name).as_text().replace("float32", "float64"))
    forward = passes.training_form(passes.select_outputs(attach_loss(graph, "cross_entropy"), []))
    before = share_common(differentiate(passes.simplified(forward)))
    after = accumulate(before)
    assert any(node.op.name == added and len(node.inputs) > node.op.accumulates > 0 for node in after.nodes)
    inputs = {
        v.name: RNG.normal(size=v.shape) if v.dtype.is_float else RNG.integers(0, 2, v.shape) for v in before.inputs
    }
    stored = {v.name: 1 + RNG.normal(size=v.shape) / 10 for v in before.stored if v.name in before.gradients}
    old, new = (evaluate(g, inputs, stored, hard=False) for g in (before, after))
    for parameter, gradient in before.gradients.items():
        scale = np.abs(old[gradient]).max() + 1e-12
        error = np.abs(old[gradient] - new[after.gradients[parameter]]).max()
        assert error <= 1e-9 * scale + 1e-14, parameter
