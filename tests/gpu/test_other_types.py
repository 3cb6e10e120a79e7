"""Kernels of a card on float16 and float64, which `cpu` leaves to NumPy: some cases of tests/engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from tests.engines import test_attention as attention
from tests.engines import test_batch_norm as batch_norm
from tests.engines import test_contraction as contraction
from tests.engines import test_convolution as convolution
from tests.engines import test_linear_cross_entropy as linear_cross_entropy
from tests.engines import test_pool as pool
from tests.engines import test_row_norm as row_norm
from tests.engines import test_softmax as softmax
from tests.engines.engine import of_type
from tests.gpu.compiled import needs_gcc

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]
# A test and what it is given beside the engine.
CASES: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (batch_norm.test_moments, ((3, 17, 4, 4),)),
    (batch_norm.test_gradient, ((3, 17, 4, 4),)),
    *((contraction.test_products, (sizes, False, False)) for sizes in ((33, 7, 20), (64, 33, 17))),
    (contraction.test_products, ((5, 4, 6000), True, False)),
    *((convolution.test_geometries, (case, last)) for case in ("3x3", "groups") for last in (True, False)),
    *((pool.test_largest, (case,)) for case in ("3x3", "3x3 of 24")),
    *((pool.test_mean, (case, False)) for case in ("3x3", "3x3 of 24")),
    *((row_norm.test_rows, (op, (6, n), 1)) for op in (LayerNorm, RMSNorm) for n in (50, 64)),
    *((row_norm.test_gradients, (op, True, (6, n), 1)) for op in (LayerNormGrad, RMSNormGrad) for n in (50, 64)),
    *((softmax.test_softmax_and_its_gradient, (Softmax, SoftmaxGrad, (6, count), 1)) for count in (90, 1023)),
    *((softmax.test_softmax_and_its_gradient, (LogSoftmax, LogSoftmaxGrad, (6, count), 1)) for count in (90, 1023)),
    *((softmax.test_cross_entropy_and_its_gradient, ((6, count), 1)) for count in (90, 1023)),
]
NARROW_ALONE: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (attention.test_attention_and_its_gradient, ((1, 2, 1, 20, 33, 16, 8), True, False)),
    (linear_cross_entropy.test_losses_and_gradients, ((20, 16, 40, 8), True, True)),
]


@pytest.mark.parametrize(
    ("dtype", "test", "given"),
    [("float16", *case) for case in CASES + NARROW_ALONE] + [("float64", *case) for case in CASES],
)
def test_a_case(dtype: str, test: Callable[..., None], given: tuple[Any, ...]) -> None:
    test(of_type("cuda", dtype), *given)
