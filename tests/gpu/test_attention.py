"""Attention and its gradients where it is packed, narrow, or too large."""

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


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_views_of_what_is_packed() -> None:
    q, k, v = operands((2, 3, 3, 10, 10, 4, 4), heads_last=True)
    packed = Window(type_of(q), (10 * 144, 144, 16, 4))
    check(Attention(0.3, True, True), q, k, v, windows=[packed] * 3, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("shared", [4, 2])
def test_packed_ones_that_lie_apart(shared: int) -> None:
    op, x = PackedAttentionGrad(0.3, 4, shared, True), normal(2, 21, (4 + 2 * shared) * 8)
    o, lse = expected(Attention(0.3, True, True), op.unpacked_arrays(x))
    given = (x, o, lse, normal(*o.shape))
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
