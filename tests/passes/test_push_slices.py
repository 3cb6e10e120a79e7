"""Only what is read is computed: slices that move towards the inputs."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, parse_graph
from foreplan.passes import differentiate, fold_constants, push_slices, share_common
from tests.ops.check import evaluate

RNG = np.random.default_rng(0)

HEAD = """graph %g
input %x: float64[2,6,4]
parameter %w: float64[4,4] = fill(0.5)
parameter %c: float64[4] = fill(0.1)
parameter %r: float64[6,1] = fill(0.1)
"""
CUT = "%y: float64[2,1,4] = slice(starts=(0, 2, 0), shape=(2, 1, 4), steps=(1, 1, 1)) [%{}] as %y\noutput %y = %y\n"
NORM = "%n.0: float64[2,6,4], %n.1: float64[{1}], %n.2: float64[{1}] = layer_norm(axis={0}, epsilon=1e-05) {2} as %n\n"


def nodes(graph: Graph) -> list[str]:
    return [line.rpartition(" as ")[0] for line in graph.as_text().splitlines() if " as %" in line]


def same_results(before: Graph, after: Graph) -> None:
    inputs = {v.name: RNG.normal(size=v.shape) for v in before.inputs}
    stored = {v.name: RNG.normal(size=v.shape) for v in before.parameters}
    old, new = evaluate(before, inputs, stored), evaluate(after, inputs, stored)
    for name, value in before.outputs.items():
        assert after.outputs[name].type == value.type
        np.testing.assert_allclose(new[after.outputs[name]], old[value], rtol=1e-13, atol=1e-13)


def check(middle: str, last: str) -> Graph:
    before = parse_graph(HEAD + middle + CUT.format(last))
    after = fold_constants(push_slices(before))
    same_results(before, after)
    return after


def test_a_chain_of_rows() -> None:
    after = check(
        NORM.format(2, "2,6", "[%x, %c]")
        + """%p: float64[2,6,4] = matmul(transpose_b=True) [%n.0, %w] as %p
%s: float64[2,6,4] = map(exprs=('(tanh((a0 + a1)) + (a2 * a3))',)) [%p, %c, %x, %r] as %s
""",
        "s",
    )
    assert nodes(after) == [
        "%x/part: float64[2,1,4] = slice(starts=(0, 2, 0), shape=(2, 1, 4), steps=(1, 1, 1)) [%x]",
        "%n/part.0: float64[2,1,4], %n/part.1: float64[2,1], %n/part.2: float64[2,1] = "
        "layer_norm(axis=2, epsilon=1e-05) [%x/part, %c]",
        "%p/part: float64[2,1,4] = matmul(transpose_b=True) [%n/part.0, %w]",
        "%r/part: float64[1,1] = slice(starts=(2, 0), shape=(1, 1), steps=(1, 1)) [%r]",
        "%s/part: float64[2,1,4] = map(exprs=('(tanh((a0 + a1)) + (a2 * a3))',)) [%p/part, %c, %x/part, %r/part]",
    ]


def test_attention_and_the_axes_of_its_heads() -> None:
    after = check(
        """%q: float64[2,6,2,2] = reshape(shape=(2, 6, 2, 2)) [%x] as %q
%o.0: float64[2,6,2,2], %o.1: float64[2,2,6] = attention(scale=0.5, heads_last=True) [%q, %q, %q] as %o
%j: float64[2,6,4] = reshape(shape=(2, 6, 4)) [%o.0] as %j
""",
        "j",
    )
    assert nodes(after)[1:] == [
        "%q/part: float64[2,1,2,2] = slice(starts=(0, 2, 0, 0), shape=(2, 1, 2, 2), steps=(1, 1, 1, 1)) [%q]",
        "%o/part.0: float64[2,1,2,2], %o/part.1: float64[2,2,1] = attention(scale=0.5, heads_last=True) "
        "[%q/part, %q, %q]",
        "%j/part: float64[2,1,4] = reshape(shape=(2, 1, 4)) [%o/part.0]",
    ]


def test_slices_with_steps_and_backward() -> None:
    text = HEAD + (
        "%s: float64[2,6,4] = map(exprs=('(a0 + a1)',)) [%x, %c] as %s\n"
        "%y: float64[2,3,1] = slice(starts=(0, 5, 3), shape=(2, 3, 1), steps=(1, -2, 1)) [%s] as %y\noutput %y = %y\n"
    )
    before = parse_graph(text)
    after = fold_constants(push_slices(before))
    assert "map" in nodes(after)[-1]
    same_results(before, after)


WHOLE = {
    "returned": ("%s: float64[2,6,4] = map(exprs=('exp(a0)',)) [%x] as %s\noutput %z = %s\n", "s"),
    "no rule": ("%s: float64[2,6,4] = softmax(axis=1) [%x] as %s\n", "s"),
    "read whole": (
        "%s: float64[2,6,4] = map(exprs=('exp(a0)',)) [%x] as %s\n"
        "%t: float64[2,6] = reduce(how='sum', axes=(2,)) [%s] as %t\noutput %t = %t\n",
        "s",
    ),
    "normalised together": (NORM.format(1, "2", "[%x]"), "n.0"),
    "causal": (
        "%q: float64[2,1,6,4] = reshape(shape=(2, 1, 6, 4)) [%x] as %q\n"
        "%o.0: float64[2,1,6,4], %o.1: float64[2,1,6] = attention(scale=0.5, causal=True) [%q, %q, %q] as %o\n"
        "%j: float64[2,6,4] = reshape(shape=(2, 6, 4)) [%o.0] as %j\n",
        "j",
    ),
    "reshaped": (
        "%f: float64[12,4] = reshape(shape=(12, 4)) [%x] as %f\n"
        "%s: float64[2,6,4] = reshape(shape=(2, 6, 4)) [%f] as %s\n",
        "s",
    ),
}


def test_a_slice_of_a_slice_along_another_axis() -> None:
    after = check(
        "%m: float64[2,6,4] = map(exprs=('(a0 * 2.0)',)) [%x] as %m\n"
        "%s: float64[2,6,1] = slice(starts=(0, 0, 2), shape=(2, 6, 1), steps=(1, 1, 1)) [%m] as %s\n"
        "%u: float64[2,6,4] = broadcast(shape=(2, 6, 4)) [%s] as %u\n",
        "u",
    )
    assert "%x/part: float64[2,1,1] = slice(starts=(0, 2, 2), shape=(2, 1, 1), steps=(1, 1, 1)) [%x]" in nodes(after)
    inner = "%s: float64[2,1,4] = slice(starts=(0, 2, 0), shape=(2, 1, 4), steps=(1, 1, 1)) [%m] as %s\n"
    text = HEAD + "%m: float64[2,6,4] = map(exprs=('(a0 * 2.0)',)) [%x] as %m\n" + inner
    text += "%y: float64[2,1,1] = slice(starts=(0, 0, 2), shape=(2, 1, 1), steps=(1, 1, 1)) [%s] as %y\n"
    before = parse_graph(text + "%z: float64[2,1,1] = map(exprs=('tanh(a0)',)) [%y] as %z\noutput %z = %z\n")
    same_results(before, push_slices(before))


@pytest.mark.parametrize(("middle", "last"), WHOLE.values(), ids=WHOLE)
def test_what_is_needed_whole_stays(middle: str, last: str) -> None:
    outputs = [line + "\n" for line in middle.splitlines() if line.startswith("output")]
    body = "".join(line + "\n" for line in middle.splitlines() if not line.startswith("output"))
    before = parse_graph(HEAD + body + CUT.format(last) + "".join(outputs))
    assert push_slices(before) is before


def test_most_of_a_tensor_is_not_worth_a_slice() -> None:
    text = HEAD + (
        "%s: float64[2,6,4] = map(exprs=('(a0 + a1)',)) [%x, %c] as %s\n"
        "%y: float64[2,5,4] = slice(starts=(0, 0, 0), shape=(2, 5, 4), steps=(1, 1, 1)) [%s] as %y\noutput %y = %y\n"
    )
    before = parse_graph(text)
    assert push_slices(before) is before


def test_a_vision_transformer_keeps_its_loss_and_gradients() -> None:
    graph = fp.models.build("vit_b16:batch=2,size=32,layers=2,width=8,heads=2,classes=3")
    graph = parse_graph(graph.as_text().replace("float32", "float64"))
    forward = share_common(passes.training_form(passes.select_outputs(attach_loss(graph, "cross_entropy"), [])))
    before, after = differentiate(forward), differentiate(push_slices(forward))
    assert len([n for n in after.nodes if n.name.endswith("/part") and n.outputs[0].shape == (2, 1, 8)]) >= 5
    inputs = {
        v.name: RNG.normal(size=v.shape) if v.dtype.is_float else RNG.integers(0, 3, v.shape) for v in before.inputs
    }
    stored = {v.name: RNG.normal(size=v.shape) / 3 for v in before.parameters}
    old, new = (evaluate(g, inputs, stored, hard=False) for g in (before, after))
    assert before.loss is not None and after.loss is not None and set(before.gradients) == set(after.gradients)
    np.testing.assert_allclose(new[after.loss], old[before.loss], rtol=1e-12)
    for name, gradient in before.gradients.items():
        np.testing.assert_allclose(new[after.gradients[name]], old[gradient], rtol=1e-8, atol=1e-10, err_msg=name)


def test_the_last_positions_logits_alone_are_computed() -> None:
    def last(tokens: fp.Tensor) -> fp.Tensor:
        x = fp.nn.embedding(tokens, 50, 8)
        return (fp.nn.layer_norm(x) @ fp.nn.parameter("head", (8, 50)))[:, -1]

    graph = passes.simplified(fp.trace(last, fp.spec((2, 16), "int64")))
    products = [node for node in graph.nodes if node.op.name == "matmul"]
    assert [node.outputs[0].shape for node in products] == [(2, 1, 50)]
