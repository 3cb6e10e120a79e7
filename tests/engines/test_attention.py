"""Attention and its gradients against NumPy's: extents, masks, layouts, shared heads, bytes taken."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from tests.engines.engine import Engine
from tests.kernels import attention_operands, dense, expected, normal
from tests.ops.check import type_of

# batch, query heads, key heads, queries, keys, depth, value depth
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 7, 5, 4, 6),
    (1, 4, 4, 33, 47, 8, 3),
    (2, 4, 2, 19, 19, 5, 5),
    (1, 6, 1, 5, 40, 16, 16),
    (1, 2, 1, 70, 65, 64, 64),
    (1, 1, 1, 18, 20, 128, 80),
    (1, 1, 1, 9, 11, 256, 200),
]
# Forward and backward: how near results are, as on `cpu` exponentials and sums are more exact.
NEAR = {
    "cpu": ({"rtol": 2e-5, "atol": 2e-5}, {"rtol": 2e-5, "atol": 2e-5}),
    "cuda": ({"rtol": 1e-4, "atol": 2e-5}, {"rtol": 1e-3, "atol": 1e-4}),
}


def operands(sizes: tuple[int, ...], heads_last: bool = False) -> list[np.ndarray]:
    return attention_operands(np.random.default_rng(sizes), sizes, heads_last)


def both(
    engine: Engine,
    op: Attention,
    inputs: list[np.ndarray],
    *mask: np.ndarray,
    gradient: bool = False,
    wide: bool = False,
) -> None:
    """Check forward and backward.

    Args:
        gradient: of the mask, too.
        wide: whether the mask stays float32.
    """
    forward, backward = NEAR[engine.name]
    engine.check(op, *inputs, *mask, wide=[3] * wide, **forward)
    o, lse = expected(op, [*inputs, *mask])
    of = AttentionGrad(op.scale, op.causal, op.heads_last, gradient)
    engine.check(of, *inputs, o, lse, normal(*o.shape), *mask, wide=[6] * wide, **backward)


@pytest.mark.bfloat16
@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_and_its_gradient(engine: Engine, sizes: tuple[int, ...], causal: bool, heads_last: bool) -> None:
    both(engine, Attention(0.1, causal, heads_last), operands(sizes, heads_last))


MASKS = [(2, 4, 21, 30), (2, 1, 1, 30), (1, 1, 21, 30), (1, 4, 1, 1), (1, 4, 21, 1), (1, 1, 1, 1)]


@pytest.mark.bfloat16
@pytest.mark.parametrize(("heads", "causal"), [(4, False), (2, True), (2, False)])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_and_their_gradients(engine: Engine, shape: tuple[int, ...], heads: int, causal: bool) -> None:
    inputs, mask = operands((2, 4, heads, 21, 30, 8, 5)), normal(*shape)
    for gradient in (False, True):
        both(engine, Attention(0.3, causal), inputs, mask, gradient=gradient, wide=gradient == causal)


@pytest.mark.bfloat16
def test_a_mask_whose_keys_lie_apart(engine: Engine) -> None:
    inputs, mask = operands((1, 2, 2, 9, 12, 4, 4)), normal(1, 2, 9, 12)
    apart = Window(type_of(mask), (9 * 12 * 2 * 4, 9 * 12 * 4, 4, 9 * 4))
    engine.check(Attention(0.3), *inputs, mask, windows=[*dense(*inputs), apart], **NEAR[engine.name][0])


@pytest.mark.bfloat16
def test_views_of_what_is_packed(engine: Engine) -> None:
    inputs = operands((2, 3, 3, 10, 10, 4, 4), heads_last=True)
    packed = Window(type_of(inputs[0]), (10 * 144, 144, 16, 4))
    engine.check(Attention(0.3, True, True), *inputs, windows=[packed] * 3, **NEAR[engine.name][0])


@pytest.mark.bfloat16
@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_may_read_no_key_give_zeros(engine: Engine, causal: bool) -> None:
    inputs, mask = operands((1, 2, 2, 9, 12, 4, 4)), np.zeros((1, 1, 9, 12), np.float32)
    mask[0, 0, 3] = mask[0, 0, 5, :2] = -np.inf
    both(engine, Attention(0.3, causal), inputs, mask)
    o, lse = engine.run(Attention(0.3, causal), [*inputs, mask])
    assert not o[0, :, 3].any() and np.isfinite(lse).all()


@pytest.mark.bfloat16
def test_what_is_not_a_number_shows(engine: Engine) -> None:
    q, k, v = operands((1, 1, 1, 6, 40, 4, 4))
    q[0, 0, 2, 1] = np.nan
    o, lse = engine.run(Attention(0.3), [q, k, v])
    assert np.isnan(o[0, 0, 2]).all() and np.isnan(lse[0, 0, 2])
    assert np.isfinite(np.delete(o[0, 0], 2, axis=0)).all()


@pytest.mark.bfloat16
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(2, 4, 4, 21, 21, 8, 8), (1, 4, 2, 40, 40, 8, 8)], ids=str)
def test_results_take_the_bytes_of_operands(engine: Engine, sizes: tuple[int, ...], causal: bool) -> None:
    inputs, (forward, backward) = operands(sizes, True), NEAR[engine.name]
    engine.check(Attention(0.3, causal, True), *inputs, over=(0, 0), **forward)
    o, lse = expected(Attention(0.3, causal, True), inputs)
    given, op = (*inputs, o, lse, normal(*o.shape)), AttentionGrad(0.3, causal, True)
    for pair in op.overwrites([type_of(x) for x in given], [type_of(x) for x in inputs]):
        if engine.name == "cpu" or pair in {(0, 3), (1, 1), (1, 3), (2, 2), (2, 3)}:  # which a card's kernels may
            engine.check(op, *given, over=pair, **backward)


@pytest.mark.bfloat16
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [4, 2])
def test_packed_queries_keys_and_values(engine: Engine, shared: int, causal: bool) -> None:
    op, x = PackedAttentionGrad(0.3, 4, shared, causal), normal(2, 21, (4 + 2 * shared) * 8)
    o, lse = expected(Attention(0.3, causal, True), op.unpacked_arrays(x))
    given, (_, backward) = (x, o, lse, normal(*o.shape)), NEAR[engine.name]
    apart = Window(type_of(x), (21 * x.shape[2] * 8, x.shape[2] * 8, 4))
    engine.check_lying(op, *given, ways=[None, [apart, *dense(*given[1:])]], **backward)
    if engine.name == "cpu":  # a card's kernel overwrites nothing
        engine.check(op, *given, over=(0, 0), **backward)
