"""Attention that is written out: which becomes one op, and that results and gradients stay."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, Node, parse_graph
from foreplan.ops.attention.ops import Attention
from foreplan.passes import fuse_attention
from tests.ops.check import evaluate
from tests.passes.steps import training_step

RNG = np.random.default_rng(0)
MODULE = sys.modules[fuse_attention.__module__]
LOWEST = -3.4028234663852886e38


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass act on graphs of any size."""
    monkeypatch.setattr(MODULE, "SCORE_BYTES", 0)


# Heads behind positions, as projections leave them.
HEADS = """graph %g
input %q: float64[2,5,3,4]
input %k: float64[2,6,3,4]
input %v: float64[2,6,3,7]
input %m: float64[2,6]
input %c: bool[2,1,1,6]
parameter %w: float64[4] = fill(0.5)
%qw: float64[2,5,3,4] = map(exprs=('(a0 * a1)',)) [%q, %w] as %qw
%qt: float64[2,3,5,4] = transpose(perm=(0, 2, 1, 3)) [%qw] as %qt
%kt: float64[2,3,4,6] = transpose(perm=(0, 2, 3, 1)) [%k] as %kt
%vt: float64[2,3,6,7] = transpose(perm=(0, 2, 1, 3)) [%v] as %vt
"""
SCORES = "%s: float64[2,3,5,6] = matmul() [%qt, %kt] as %s\n"
REST = """%p: float64[2,3,5,6] = softmax(axis=3) [%{}] as %p
%o: float64[2,3,5,7] = matmul() [%p, %vt] as %o
%ot: float64[2,5,3,7] = transpose(perm=(0, 2, 1, 3)) [%o] as %ot
%loss: float64[] = reduce(how='sum', axes=(0, 1, 2, 3)) [%ot] as %loss
output %y = %ot
loss %loss
"""
PADDING = """%a: float64[2,6] = map(exprs=('((1.0 - a0) * -10000.0)',)) [%m] as %a
%b: float64[2,1,1,6] = reshape(shape=(2, 1, 1, 6)) [%a] as %b
"""


def mapped(expr: str, *others: str) -> str:
    return f"%t: float64[2,3,5,6] = map(exprs=('{expr}',)) [%s{''.join(f', %{each}' for each in others)}] as %t\n"


def ops(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, Attention)]


def given(graph: Graph) -> dict[str, np.ndarray]:
    """Inputs: half of a mask set, its first key always."""
    found = {}
    for value in graph.inputs:
        array = RNG.standard_normal(value.shape)
        if value.dtype.name != "float64" or len(value.shape) == 2:
            array = array > 0
            array[..., 0] = True
        found[value.name] = array.astype(value.dtype.numpy)
    return found


def same(before: Graph, after: Graph) -> None:
    """Outputs, and the gradient of what there is to train."""
    inputs = given(before)
    stored = {v.name: RNG.uniform(0.5, 1, v.shape) for v in before.stored if v.kind.name == "PARAMETER"}
    for old, new in ((before, after), (differentiated(before, fused=False), differentiated(before, fused=True))):
        results = [evaluate(graph, inputs, stored, hard=False) for graph in (old, new)]
        for x, y in zip(old.results, new.results, strict=True):
            np.testing.assert_allclose(results[1][y], results[0][x], rtol=1e-10, atol=1e-12, err_msg=x.name)


def differentiated(graph: Graph, fused: bool) -> Graph:
    step = training_step(graph, without=() if fused else ("fuse_attention",))
    assert bool(ops(step)) == fused
    return step


CASES = {
    "plain": (SCORES + REST.format("s"), 1.0),
    "divided": (SCORES + mapped("(a0 / 4.0)") + REST.format("t"), 0.25),
    "times a number, which stands first": (SCORES + mapped("(0.5 * a0)") + REST.format("t"), 0.5),
    "less what is masked": (
        PADDING + SCORES + mapped("((a0 / 2.0) + a1)", "b") + REST.format("t"),
        0.5,
    ),
    "scaled after it was masked": (PADDING + SCORES + mapped("((a1 + a0) * 0.25)", "b") + REST.format("t"), 0.25),
    "subtracted": (PADDING + SCORES + mapped("(a0 - (a1 * -1.0))", "b") + REST.format("t"), 1.0),
    "put in the place of scores": (
        SCORES + mapped(f"where(a1, (a0 * 0.5), {LOWEST})", "c") + REST.format("t"),
        0.5,
    ),
    "kept, or else the lowest": (SCORES + mapped(f"where(a1, {LOWEST}, a0)", "nc") + REST.format("t"), 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_scales_and_masks(case: str) -> None:
    text, scale = CASES[case]
    negated = "%nc: bool[2,1,1,6] = map(exprs=('not_(a0)',)) [%c] as %nc\n" if "%nc" in text else ""
    graph = parse_graph(HEADS + negated + text)
    after = fuse_attention(graph)
    (node,) = ops(after)
    assert isinstance(node.op, Attention)
    assert (node.op.scale, node.op.causal, node.op.heads_last) == (scale, False, True)
    assert len(node.inputs) == 3 + (text.count("[%s, %") > 0)
    assert not any(each.op.name in ("softmax", "matmul") for each in after.nodes)
    assert [value.shape for value in node.inputs[:3]] == [(2, 5, 3, 4), (2, 6, 3, 4), (2, 6, 3, 7)]
    same(graph, after)


def test_either_side_is_scaled() -> None:
    """As PyTorch writes scaled_dot_product_attention: the scale's root on both sides."""
    text = (HEADS + SCORES + REST.format("s")).replace("matmul() [%qt, %kt]", "matmul() [%qs, %ks]")
    sides = """%qs: float64[2,3,5,4] = map(exprs=('(a0 * 0.5)',)) [%qt] as %qs
%ks: float64[2,3,4,6] = map(exprs=('(a0 * 0.5)',)) [%kt] as %ks
"""
    graph = parse_graph(text.replace("%s:", sides + "%s:"))
    after = fuse_attention(graph)
    (node,) = ops(after)
    assert isinstance(node.op, Attention) and node.op.scale == 0.25
    assert len([each for each in after.nodes if each.op.name == "map"]) == 1
    same(graph, after)


EXPORTED = """graph %g
input %q: float64[2,5,3,4]
input %k: float64[2,6,3,4]
input %v: float64[2,6,3,7]
input %c: bool[2,1,5,6]
%qt: float64[2,3,5,4] = transpose(perm=(0, 2, 1, 3)) [%q] as %qt
%kt: float64[2,3,6,4] = transpose(perm=(0, 2, 1, 3)) [%k] as %kt
%vt: float64[2,3,6,7] = transpose(perm=(0, 2, 1, 3)) [%v] as %vt
%kr: float64[6,6,4] = reshape(shape=(6, 6, 4)) [%kt] as %kr
%kn: float64[6,4,6] = transpose(perm=(0, 2, 1)) [%kr] as %kn
%kh: float64[2,3,4,6] = reshape(shape=(2, 3, 4, 6)) [%kn] as %kh
%qs: float64[2,3,5,4] = map(exprs=('(a0 * 0.5)',)) [%qt] as %qs
%ks: float64[2,3,4,6] = map(exprs=('(a0 * 0.5)',)) [%kh] as %ks
%m: float64[2,1,5,6] = map(exprs=('float64(where(a0, 0.0, -inf))',)) [%c] as %m
%s: float64[2,3,5,6] = matmul() [%qs, %ks] as %s
%t: float64[2,3,5,6] = map(exprs=('(a0 + a1)',)) [%s, %m] as %t
%p: float64[2,3,5,6] = softmax(axis=3) [%t] as %p
%g: float64[2,3,5,6] = map(exprs=('where(isnan(a0), 0.0, a0)',)) [%p] as %g
%o: float64[2,3,5,7] = matmul() [%g, %vt] as %o
%ot: float64[2,5,3,7] = transpose(perm=(0, 2, 1, 3)) [%o] as %ot
output %y = %ot
"""


def test_as_pytorch_exports_it_with_a_mask() -> None:
    """The roots of the scale on both sides, keys turned around as a batch of matrices, and NaN set to zero: the results
    of queries that read no key are zeros, as PyTorch's own are.
    """
    graph = parse_graph(EXPORTED)
    after = fuse_attention(graph)
    (node,) = ops(after)
    assert isinstance(node.op, Attention) and node.op.heads_last and node.op.scale == 0.25
    assert [x.name for x in node.inputs] == ["q", "k", "v", "m"]
    inputs = given(graph)
    inputs["c"][1, 0, 2] = False  # reads no key
    old, new = (evaluate(each, inputs, hard=False)[each.outputs["y"]] for each in (graph, after))
    np.testing.assert_allclose(new, old, rtol=1e-12, atol=1e-14)
    assert not new[1, 2].any()


IN_TWO = """%n: bool[2,3,5,6] = map(exprs=('isnan(a0)',)) [%p] as %n
%g: float64[2,3,5,6] = map(exprs=('where(a0, 0.0, a1)',)) [%n, %p] as %g
"""


def test_what_is_nan_is_set_to_zero_by_two_nodes() -> None:
    """As the exporter writes it, before maps are fused."""
    one = "%g: float64[2,3,5,6] = map(exprs=('where(isnan(a0), 0.0, a0)',)) [%p] as %g\n"
    assert one in EXPORTED
    after = fuse_attention(parse_graph(EXPORTED.replace(one, IN_TWO)))
    assert after.as_text() == fuse_attention(parse_graph(EXPORTED)).as_text()
    read_twice = EXPORTED.replace(one, IN_TWO).replace("output %y = %ot", "output %y = %ot\noutput %p = %p")
    assert not ops(fuse_attention(parse_graph(read_twice)))


def test_the_smallest_scores_may_be_said() -> None:
    graph = parse_graph(EXPORTED)
    assert ops(fuse_attention(graph, least=2 * 3 * 5 * 6 * 8)) and not ops(
        fuse_attention(graph, least=2 * 3 * 5 * 6 * 8 + 1)
    )


@pytest.mark.parametrize(
    "expr",
    ["where(isnan(a0), 1.0, a0)", "where(isnan(a0), a0, 0.0)", "where((a0 > 0.5), 0.0, a0)", "(a0 * 0.5)"],
)
def test_probabilities_that_are_something_else(expr: str) -> None:
    graph = parse_graph(EXPORTED.replace("where(isnan(a0), 0.0, a0)", expr))
    assert not ops(fuse_attention(graph))


def test_keys_that_change_places_otherwise() -> None:
    """Two axes merged of which one is that of the positions: no exchange of the last two."""
    other = EXPORTED.replace("[6,6,4] = reshape(shape=(6, 6, 4))", "[4,6,6] = reshape(shape=(4, 6, 6))")
    other = other.replace("[6,4,6] = transpose(perm=(0, 2, 1))", "[4,6,6] = transpose(perm=(0, 2, 1))")
    graph = parse_graph(other)
    after = fuse_attention(graph)
    inputs = given(graph)
    old, new = (evaluate(each, inputs, hard=False)[each.outputs["y"]] for each in (graph, after))
    np.testing.assert_allclose(new, old, rtol=1e-12, atol=1e-14)


def test_heads_before_positions_and_transposed_factors() -> None:
    """Three axes; keys as rows; values turned around; nothing is transposed in memory."""
    graph = parse_graph("""graph %g
input %q: float64[3,5,4]
input %k: float64[3,6,4]
input %v: float64[3,7,6]
input %m: float64[5,6]
parameter %w: float64[4] = fill(0.5)
%qw: float64[3,5,4] = map(exprs=('(a0 * a1)',)) [%q, %w] as %qw
%s: float64[3,5,6] = matmul(transpose_b=True) [%qw, %k] as %s
%t: float64[3,5,6] = map(exprs=('(a0 + a1)',)) [%s, %m] as %t
%p: float64[3,5,6] = softmax(axis=2) [%t] as %p
%o: float64[3,5,7] = matmul(transpose_b=True) [%p, %v] as %o
%loss: float64[] = reduce(how='sum', axes=(0, 1, 2)) [%o] as %loss
output %y = %o
loss %loss
""")
    after = fuse_attention(graph)
    (node,) = ops(after)
    assert isinstance(node.op, Attention) and not node.op.heads_last
    assert [value.shape for value in node.inputs] == [(1, 3, 5, 4), (1, 3, 6, 4), (1, 3, 6, 7), (1, 1, 5, 6)]
    same(graph, after)


TRIANGLE = np.tril(np.ones((5, 6), bool))
FAR = np.where(TRIANGLE, 0, -np.inf)
WINDOW = np.where(TRIANGLE & ~np.tril(np.ones((5, 6), bool), -3), 0, -np.inf)


def with_mask(array: np.ndarray, text: str) -> Graph:
    """A graph with a mask %u that is known."""
    shape = ",".join(map(str, array.shape))
    content = str(array.tolist()).replace("inf", "1e400")
    constant = f"constant %u: {array.dtype}[{shape}] = array({content})\n"
    return parse_graph(HEADS.replace("parameter %w", constant + "parameter %w") + text)


@pytest.mark.parametrize(
    ("array", "expr"),
    [
        (TRIANGLE, "where(a1, (a0 / 2.0), -10000.0)"),
        (TRIANGLE[None, None], f"where(a1, (a0 / 2.0), {LOWEST})"),
        (FAR, "((a0 / 2.0) + a1)"),
        (np.stack([FAR, FAR])[:, None], "((a0 / 2.0) + a1)"),
        (TRIANGLE, "((a0 * 0.5) + where(a1, 0.0, -1e9))"),
    ],
)
def test_a_mask_that_is_known_and_causal(array: np.ndarray, expr: str) -> None:
    graph = with_mask(array, SCORES + mapped(expr, "u") + REST.format("t"))
    after = fuse_attention(graph)
    (node,) = ops(after)
    assert isinstance(node.op, Attention) and node.op.causal and node.op.scale == 0.5 and len(node.inputs) == 3
    same(graph, after)


def test_a_causal_mask_beside_padding() -> None:
    """GPT-2's own: what is ahead is known, what is padding is not."""
    text = PADDING + SCORES + mapped("(where(a2, a0, -10000.0) + a1)", "b", "u") + REST.format("t")
    graph = with_mask(TRIANGLE, text)
    after = fuse_attention(graph)
    (node,) = ops(after)
    assert isinstance(node.op, Attention) and node.op.causal and node.inputs[3].shape == (2, 1, 1, 6)
    same(graph, after)


def test_other_masks_that_are_known_stay() -> None:
    graph = with_mask(WINDOW, SCORES + mapped("(a0 + a1)", "u") + REST.format("t"))
    after = fuse_attention(graph)
    (node,) = ops(after)
    assert isinstance(node.op, Attention) and not node.op.causal and node.inputs[3].shape == (1, 1, 5, 6)
    same(graph, after)
    one_of_two = np.stack([FAR, WINDOW])[:, None]
    (node,) = ops(fuse_attention(with_mask(one_of_two, SCORES + mapped("(a0 + a1)", "u") + REST.format("t"))))
    assert isinstance(node.op, Attention) and not node.op.causal
    nothing = fuse_attention(with_mask(0 * TRIANGLE, SCORES + mapped("(a0 + a1)", "u") + REST.format("t")))
    assert len(ops(nothing)[0].inputs) == 3


def test_a_mask_that_is_trained() -> None:
    """As in T5: what is added to scores has a gradient."""
    text = (HEADS + SCORES + mapped("(a0 + a1)", "r") + REST.format("t")).replace(
        "parameter %w", "parameter %r: float64[1,3,5,6] = fill(0.1)\nparameter %w"
    )
    graph = parse_graph(text)
    after = fuse_attention(graph)
    assert ops(after)[0].inputs[3].name == "r"
    same(graph, after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("softmax(axis=3) [%s]", "softmax(axis=2) [%s]"),
        ("output %y = %ot", "output %y = %ot\noutput %s = %s"),  # somebody wants the scores
        ("output %y = %ot", "output %y = %ot\noutput %p = %p"),
        ("softmax(axis=3) [%s]", "log_softmax(axis=3) [%s]"),
    ],
)
def test_what_is_left_alone(old: str, new: str) -> None:
    text = HEADS + SCORES + REST.format("s")
    assert old in text
    graph = parse_graph(text.replace(old, new))
    assert fuse_attention(graph) is graph


@pytest.mark.parametrize(
    "expr",
    [
        "where(a1, a0, -10000.0)",  # a query that reads no key would weigh all alike
        "where(a1, a0, 5.0)",
        "(a0 * a0)",
        "tanh(a0)",
        "(a0 / (2.0 + float64(a1)))",
        "where((a0 > 0), a0, -inf)",
    ],
)
def test_scores_that_are_something_else(expr: str) -> None:
    graph = parse_graph(HEADS + SCORES + mapped(expr, "c") + REST.format("t"))
    assert fuse_attention(graph) is graph


def test_a_mask_far_behind_in_the_model() -> None:
    """Each of its values is looked at once, however many ways lead to it."""
    kind = "float64[2,1,1,6]"
    lines = [
        f"%n{i}: {kind} = map(exprs=('(0.0 - a0)',)) [%r{i}] as %n{i}\n"
        f"%r{i + 1}: {kind} = map(exprs=('(a0 + a1)',)) [%r{i}, %n{i}] as %r{i + 1}\n"
        for i in range(64)
    ]
    first = "%r0: float64[2,1,1,6] = reshape(shape=(2, 1, 1, 6)) [%m] as %r0\n"
    rest = SCORES + mapped("(a0 + a1)", "r64") + REST.format("t")
    graph = parse_graph(HEADS + first + "".join(lines) + rest)
    (node,) = ops(fuse_attention(graph))
    assert node.inputs[3].shape == (2, 1, 1, 6)


def test_small_scores_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "SCORE_BYTES", 1 << 16)
    graph = parse_graph(HEADS + SCORES + REST.format("s"))
    assert fuse_attention(graph) is graph


def test_a_whole_step_and_inference_never_hold_the_scores() -> None:
    """A traced model that writes attention out; 256 positions of 4 heads at batch 2: 2 MiB of scores."""

    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        q, k, v = (
            fp.nn.linear(x, 64, name=name).reshape(2, 256, 4, 16).transpose(0, 2, 1, 3) for name in ("q", "k", "v")
        )
        y = fp.nn.softmax(q @ k.transpose(0, 1, 3, 2) * 0.25) @ v
        return fp.nn.linear(y.transpose(0, 2, 1, 3).reshape(2, 256, 64), 64, name="o")

    graph = fp.trace(model, fp.spec((2, 256, 64)))
    step = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.1))
    assert ops(step.graph) and max(value.nbytes for value in step.program.values) < 2 << 20
    assert ops(fp.inference(graph))
