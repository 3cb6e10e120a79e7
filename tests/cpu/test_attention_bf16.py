"""Attention of bfloat16, its gradients, and the loss over a large vocabulary: beside float32 on the same numbers.

Probabilities, and gradients of scores, are rounded before they are multiplied: results err by what a sum of so rounded
terms does.
"""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.runtime.cpu.kernels.linear_cross_entropy import CLASSES
from tests.cpu.check import expected, needs_onednn, run, type_of
from tests.cpu.narrow import ULP, check_narrow, narrow, widened
from tests.engines import test_attention

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)
ROUNDED = {"exact": ULP}


def normal(*shape: int) -> np.ndarray:
    return narrow(RNG.standard_normal(shape))


def operands(sizes: tuple[int, ...], heads_last: bool = False) -> list[np.ndarray]:
    return [narrow(x) for x in test_attention.operands(sizes, heads_last)]


def forward(op: Attention, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The output, narrow, and the log-sum-exps."""
    o, lse = expected(op, [widened(x) for x in inputs])
    return [narrow(o), lse]


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", test_attention.SIZES, ids=str)
def test_attention_and_its_gradient(sizes: tuple[int, ...], causal: bool, heads_last: bool) -> None:
    op, inputs = Attention(0.3, causal, heads_last), operands(sizes, heads_last)
    check_narrow(op, *inputs, **ROUNDED)
    o, lse = forward(op, inputs)
    check_narrow(AttentionGrad(0.3, causal, heads_last), *inputs, o, lse, normal(*o.shape), **ROUNDED)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", test_attention.MASKS, ids=str)
def test_masks_and_their_gradients(shape: tuple[int, ...], wide: bool) -> None:
    inputs, mask = operands((2, 4, 2, 21, 30, 8, 5)), normal(*shape)
    mask = widened(mask) if wide else mask
    check_narrow(Attention(0.3), *inputs, mask, **ROUNDED)
    o, lse = forward(Attention(0.3), [*inputs, mask])
    check_narrow(AttentionGrad(0.3, mask_gradient=True), *inputs, o, lse, normal(*o.shape), mask, **ROUNDED)


@pytest.mark.parametrize("causal", [False, True])
def test_results_take_the_bytes_of_operands(causal: bool) -> None:
    inputs, op = operands((1, 2, 2, 270, 270, 8, 8), True), Attention(0.3, causal, True)
    check_narrow(op, *inputs, over=(0, 0), **ROUNDED)
    o, lse = forward(op, inputs)
    gradient, given = AttentionGrad(0.3, causal, True), [*inputs, o, lse, normal(*o.shape)]
    for pair in gradient.overwrites([type_of(x) for x in given], [type_of(x) for x in inputs]):
        check_narrow(gradient, *given, over=pair, **ROUNDED)


@pytest.mark.parametrize("positions", [21, 270])
def test_packed_queries_keys_and_values(positions: int) -> None:
    op, x = PackedAttentionGrad(0.3, 4, 2, True), normal(2, positions, 8 * 8)
    o, lse = forward(Attention(0.3, True, True), op.unpacked_arrays(x))
    g = normal(*o.shape)
    check_narrow(op, x, o, lse, g, **ROUNDED)
    check_narrow(op, x, o, lse, g, over=(0, 0), **ROUNDED)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (5, 7, 3, 2), (37, 16, CLASSES, 37), (33, 20, CLASSES + 1, 16)])
def test_the_loss_over_a_large_vocabulary(sizes: tuple[int, int, int, int], biased: bool) -> None:
    rows, depth, classes, chunk = sizes
    bias = [widened(normal(classes))] * biased
    h, w, target = normal(rows, depth), normal(classes, depth), RNG.integers(0, classes, rows)
    check_narrow(LinearCrossEntropy(chunk, wide=True), h, w, target, *bias, **ROUNDED)
    check_narrow(LinearCrossEntropy(chunk, wide=True), h, w, target, *bias, over=(1, 0), **ROUNDED)


def test_what_is_not_a_number_shows() -> None:
    q, k, v = operands((1, 1, 1, 6, 40, 4, 4))
    q[0, 0, 2, 1] = np.nan
    o, lse = run(Attention(0.3), [q, k, v])
    assert np.isnan(o[0, 0, 2]).all() and np.isnan(lse[0, 0, 2])
    assert np.isfinite(np.delete(o[0, 0].astype(np.float32), 2, axis=0)).all()
