"""One-bit masks: where the backward pass keeps them, and that no bit of the results changes."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, parse_graph
from foreplan.passes import differentiate, fuse_maps, pack_masks, share_common, simplified
from tests.ops.check import evaluate

RNG = np.random.default_rng(0)

HEAD = """graph %g
input %x: float32[128,64,8]
parameter %w: float32[64,64] = fill(0.1)
parameter %v: float32[8,8] = fill(0.1)
%h: float32[128,64,8] = matmul() [%w, %x] as %h
%r: float32[128,64,8] = map(exprs=('{}',)) [%h] as %r
"""
POOLED = """%m: float32[128,64,1] = reduce(how='sum', axes=(2,), keepdims=True) [%r] as %m
%loss: float32[] = reduce(how='mean', axes=(0, 1, 2)) [%m] as %loss
loss %loss
"""
PRODUCT = """%p: float32[128,64,8] = matmul() [%r, %v] as %p
%loss: float32[] = reduce(how='mean', axes=(0, 1, 2)) [%p] as %loss
loss %loss
"""


def step(text: str) -> tuple[Graph, Graph]:
    """The whole step without masks and with them."""
    whole = fuse_maps(share_common(differentiate(parse_graph(text))))
    return whole, pack_masks(whole)


def lines(graph: Graph, op: str) -> list[str]:
    return [line for line in graph.as_text().splitlines() if f"= {op}(" in line]


def same_bits(before: Graph, after: Graph) -> None:
    inputs = {"x": RNG.normal(size=(128, 64, 8)).astype(np.float32)}
    stored = {v.name: RNG.normal(size=v.shape).astype(np.float32) for v in before.parameters}
    old, new = evaluate(before, inputs, stored, hard=False), evaluate(after, inputs, stored, hard=False)
    for name, gradient in before.gradients.items():
        assert old[gradient].tobytes() == new[after.gradients[name]].tobytes()


def test_an_activation_that_only_relu_asks_about_is_kept_as_bits() -> None:
    before, after = step(HEAD.format("relu(a0)") + POOLED)
    assert lines(after, "pack_bits") == [
        "%r/mask: uint8[8192] = pack_bits(condition='(a0 > 0)') [%r] as %r/mask",
    ]
    (masked,) = lines(after, "masked_map")
    assert masked.startswith("~%") and "masked_map(exprs=('where(a0, a1, 0.0)',)) [%r/mask, " in masked
    (activation,) = (value for value in after.values() if value.name == "r")
    assert {node.op.name for node in after.readers[activation]} == {"reduce", "pack_bits"}
    same_bits(before, after)
    assert pack_masks(after).as_text() == after.as_text()


def test_one_that_a_weight_gradient_reads_is_asked_before_that() -> None:
    before, after = step(HEAD.format("relu(a0)") + PRODUCT)
    (packed,) = lines(after, "pack_bits")
    assert packed.startswith("~%r/mask")
    names = [node.op.name for node in after.nodes]
    first_gradient = next(i for i, n in enumerate(after.nodes) if n.outputs[0].shape == (8, 8) and "grad" in n.name)
    assert names.index("pack_bits") < first_gradient < names.index("masked_map")
    same_bits(before, after)


def test_two_bounds_are_one_question() -> None:
    before, after = step(HEAD.format("clip(a0, 0.0, 1.0)") + POOLED)
    (packed,) = lines(after, "pack_bits")
    assert "and_((a0 > 0.0), (a0 < 1.0))" in packed
    same_bits(before, after)


@pytest.mark.parametrize(
    "text",
    [
        HEAD.format("tanh(a0)") + POOLED,
        HEAD.format("(relu(a0) * a0)") + POOLED,
        (HEAD.format("relu(a0)") + POOLED).replace("128", "2"),
    ],
    ids=["the value itself is needed", "question and value", "small"],
)
def test_what_needs_the_value_keeps_it(text: str) -> None:
    before, after = step(text)
    assert not lines(after, "pack_bits") and before is after


def test_what_is_returned_is_there_to_ask() -> None:
    before, after = step(HEAD.format("relu(a0)") + POOLED.replace("loss %loss\n", "output %y = %r\nloss %loss\n"))
    assert before is after


def test_simplifying_again_changes_nothing() -> None:
    graph = fp.models.build("unet:batch=1,size=32,width=16")
    compiled = fp.compile(graph, loss=fp.losses.cross_entropy, remat="off")
    assert any(call.op.name == "pack_bits" for call in compiled.program.calls)
    whole = compiled.graph
    assert whole is not None and simplified(whole).as_text() == whole.as_text()
