"""Attention and its gradients against NumPy's: extents, masks, layouts, shared heads, bytes taken."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.types import DTYPES
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cuda.kernels.attention import attention
from foreplan.runtime.kernel import Refused
from tests.gpu.check import DEVICE, check, expected, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import attention_operands

pytestmark = needs_gcc
RNG = np.random.default_rng(0)
operands = partial(attention_operands, RNG)

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


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def both(scale: float, causal: bool, heads_last: bool, inputs: list[np.ndarray], *mask: np.ndarray) -> None:
    """Check forward and backward."""
    forward = Attention(scale, causal, heads_last)
    check(forward, *inputs, *mask, rtol=1e-4, atol=2e-5)
    o, lse = expected(forward, [*inputs, *mask])
    check(AttentionGrad(scale, causal, heads_last), *inputs, o, lse, normal(*o.shape), *mask, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_and_its_gradient(sizes: tuple[int, ...], causal: bool) -> None:
    heads_last = sizes[3] % 2 == 1
    both(0.1, causal, heads_last, operands(sizes, heads_last))


MASKS = [(2, 4, 21, 30), (2, 1, 1, 30), (1, 1, 21, 30), (1, 4, 1, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_and_their_gradients(shape: tuple[int, ...]) -> None:
    inputs, mask = operands((2, 4, 2, 21, 30, 8, 5)), normal(*shape)
    both(0.3, False, False, inputs, mask)
    for causal in (False, True):
        o, lse = expected(Attention(0.3, causal), [*inputs, mask])
        op = AttentionGrad(0.3, causal, mask_gradient=True)
        check(op, *inputs, o, lse, normal(*o.shape), mask, rtol=1e-3, atol=1e-4)


def test_rows_that_read_nothing_are_zero() -> None:
    inputs, mask = operands((1, 2, 2, 5, 40, 4, 4)), normal(1, 1, 5, 40)
    mask[0, 0, 2], mask[0, 0, 3, ::2] = -np.inf, -np.inf
    both(0.5, False, False, inputs, mask)


def test_results_take_the_bytes_of_what_is_no_longer_read() -> None:
    inputs = operands((2, 3, 3, 40, 40, 8, 8))
    check(Attention(0.3), *inputs, over=(0, 0), rtol=1e-4, atol=2e-5)
    o, lse = expected(Attention(0.3), inputs)
    given = (*inputs, o, lse, normal(*o.shape))
    for over in ((0, 3), (1, 1), (1, 3), (2, 2), (2, 3)):
        check(AttentionGrad(0.3), *given, over=over, rtol=1e-3, atol=1e-4)


def test_views_of_what_is_packed() -> None:
    q, k, v = operands((2, 3, 3, 10, 10, 4, 4), heads_last=True)
    packed = Window(type_of(q), (10 * 144, 144, 16, 4))
    check(Attention(0.3, True, True), q, k, v, windows=[packed] * 3, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("shared", [4, 2])
def test_packed_queries_keys_and_values(shared: int) -> None:
    op, x = PackedAttentionGrad(0.3, 4, shared, True), normal(2, 21, (4 + 2 * shared) * 8)
    o, lse = expected(Attention(0.3, True, True), op.unpacked_arrays(x))
    given = (x, o, lse, normal(*o.shape))
    check(op, *given, rtol=1e-3, atol=1e-4)
    apart = Window(type_of(x), (21 * x.shape[2] * 8, x.shape[2] * 8, 4))
    check(op, *given, windows=[apart, *(Window.dense(type_of(y)) for y in given[1:])], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_elements(dtype: str) -> None:
    inputs = [x.astype(DTYPES[dtype].numpy) for x in operands((1, 2, 1, 20, 33, 16, 8))]
    check(Attention(0.2, True), *inputs, rtol=2e-2, atol=1e-2)
    o, lse = expected(Attention(0.2, True), inputs)
    check(AttentionGrad(0.2, True), *inputs, o, lse, normal(*o.shape).astype(o.dtype), rtol=3e-2, atol=3e-2)


def test_long_heads_and_wide_elements_are_refused() -> None:
    for x in (normal(1, 1, 4, 600), normal(1, 1, 4, 4).astype(np.float64)):
        types = [Window.dense(type_of(x))] * 3
        outputs = [Window.dense(type) for type in Attention(1.0).infer([w.type for w in types])]
        with pytest.raises(Refused):
            attention(Attention(1.0), types, outputs, DEVICE)
