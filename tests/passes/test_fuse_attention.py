"""Attention that is written out, beside the texts of `fuse_attention/`: in whole steps, and deep in a model."""

from __future__ import annotations

import numpy as np

import foreplan as fp
from foreplan.graph import Graph, Node, parse_graph
from foreplan.ops.attention.ops import Attention
from foreplan.passes import FuseAttention
from tests.ops.check import evaluate
from tests.passes.texts import FOLDER, cases_of

CASES = {case.title: case.before for file in FOLDER.glob("fuse_attention/*.txt") for case in cases_of(file)}


def ops(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, Attention)]


def test_a_query_that_reads_no_key_gives_zeros() -> None:
    """As PyTorch's own does, whose export sets what is NaN to zero."""
    (text,) = (text for title, text in CASES.items() if title.startswith("As PyTorch exports it with a mask"))
    graph = parse_graph(text)
    inputs = {value.name: np.random.default_rng(0).standard_normal(value.shape) for value in graph.inputs}
    inputs["c"] = inputs["c"] > 0
    inputs["c"][1, 0, 2] = False
    pair = graph, FuseAttention(least=0)(graph)
    results = [evaluate(each, inputs, hard=False)[each.outputs["y"]] for each in pair]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-12, atol=1e-14)
    assert not results[1][1, 2].any()


def test_a_mask_far_behind_in_the_model() -> None:
    """Each of its values is looked at once, however many ways lead to it."""
    kind = "float64[2,1,1,6]"
    lines = [
        f"%n{i}: {kind} = map(exprs=('(0.0 - a0)',)) [%r{i}] as %n{i}\n"
        f"%r{i + 1}: {kind} = map(exprs=('(a0 + a1)',)) [%r{i}, %n{i}] as %r{i + 1}\n"
        for i in range(64)
    ]
    first = "%r0: float64[2,1,1,6] = reshape(shape=(2, 1, 1, 6)) [%m] as %r0\n"
    plain = CASES["Padding is taken from scores, as BERT does it."]
    head, _, rest = plain.partition("%a: ")
    graph = parse_graph(head + first + "".join(lines) + "%s: " + rest.partition("%s: ")[2].replace("%b]", "%r64]"))
    (node,) = ops(FuseAttention(least=0)(graph))
    assert node.inputs[3].shape == (2, 1, 1, 6)


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
