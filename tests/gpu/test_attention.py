"""Attention and its gradients of other types, and where heads are too long."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.runtime.cuda.kernels.attention import attention
from foreplan.runtime.kernel import Refused
from tests.engines.test_attention import operands
from tests.gpu.check import DEVICE, check, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import expected, normal

pytestmark = needs_gcc


def test_float16() -> None:
    inputs = [x.astype(np.float16) for x in operands((1, 2, 1, 20, 33, 16, 8))]
    check(Attention(0.2, True), *inputs, rtol=2e-2, atol=1e-2)
    o, lse = expected(Attention(0.2, True), inputs)
    check(AttentionGrad(0.2, True), *inputs, o, lse, normal(*o.shape).astype(o.dtype), rtol=3e-2, atol=3e-2)


def test_long_heads_and_wide_elements_are_refused() -> None:
    for x in (normal(1, 1, 4, 600), normal(1, 1, 4, 4).astype(np.float64)):
        types = [Window.dense(type_of(x))] * 3
        outputs = [Window.dense(type) for type in Attention(1.0).infer([w.type for w in types])]
        with pytest.raises(Refused):
            attention(Attention(1.0), types, outputs, DEVICE)
