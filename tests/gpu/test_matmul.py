"""Matrix products by kernels of ours: what one launch does, sums in parts."""

from __future__ import annotations

import numpy as np

from foreplan.ops.matmul import MatMul
from tests.engines.engine import NARROW
from tests.gpu.check import check, made, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_rows_of_all_batches_make_one_product_where_they_share_a_side() -> None:
    kernel, _, _ = made(MatMul(), [type_of(f32(8, 16, 32)), type_of(f32(32, 48))])
    (launch,) = kernel.instructions
    assert launch.arguments[:2] == (128, 48)


def test_long_sums_are_taken_in_parts() -> None:
    a, b = f32(6000, 5), f32(6000, 40)
    kernel, _, _ = made(MatMul(True), [type_of(a), type_of(b)])
    assert len(kernel.instructions) == 2 and kernel.workspace > 0
    check(MatMul(True), a, b, rtol=1e-4, atol=1e-3)
    check(MatMul(True), a, b, f32(5, 40), over=(0, 2), rtol=1e-4, atol=1e-3)
    for wide in (False, True):
        NARROW["cuda"].check_over(MatMul(True, wide=wide), [a, b, f32(5, 40)], None, (0, 2))


def test_nothing_to_sum() -> None:
    check(MatMul(), f32(3, 0), f32(0, 5))
    check(MatMul(), f32(0, 3), f32(3, 5))
