"""Matrix products by kernels of ours: what one launch does, sums in parts, other types."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.matmul import MatMul
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types(dtype: str) -> None:
    a, b = (f32(*shape).astype(DTYPES[dtype].numpy) for shape in ((33, 20), (20, 7)))
    narrow = {"float16": 2e-3, "bfloat16": 1e-2, "float64": 1e-12}[dtype]
    check(MatMul(), a, b, rtol=narrow, atol=narrow)
    if dtype != "float64":
        check(MatMul(wide=True), a, b, rtol=1e-5, atol=1e-5)
        long = (f32(6000, 5).astype(a.dtype), f32(6000, 4).astype(a.dtype))
        check(MatMul(True), *long, rtol=narrow, atol=0.2)
        check(MatMul(True, wide=True), *long, f32(5, 4), rtol=1e-4, atol=1e-3)


def test_nothing_to_sum() -> None:
    check(MatMul(), f32(3, 0), f32(0, 5))
    check(MatMul(), f32(0, 3), f32(3, 5))
