"""Matrix products that are added to something, and how their factors may lie; tests/sweep draws them, too."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, as_dtype
from foreplan.ops import matmul as module
from foreplan.ops.matmul import MatMul
from tests.ops.check import allocated_bytes, check_vjp, refused, run_op, type_of

BATCHES = [((), ()), ((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (3,)), ((1,), (4,))]
TRANSPOSED = [(False, False), (True, False), (False, True), (True, True)]


def _operands(batches: tuple[tuple[int, ...], tuple[int, ...]], a_t: bool, b_t: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    m, k, n = 4, 5, 3
    a = rng.standard_normal((*batches[0], *((k, m) if a_t else (m, k))))
    b = rng.standard_normal((*batches[1], *((n, k) if b_t else (k, n))))
    return [a, b]


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize(("a_t", "b_t"), TRANSPOSED)
def test_added_to_a_third_input(
    batches: tuple[tuple[int, ...], tuple[int, ...]], a_t: bool, b_t: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRODUCT_BYTES", rows * 3 * 8)
    a, b = _operands(batches, a_t, b_t)
    product = (a.swapaxes(-1, -2) if a_t else a) @ (b.swapaxes(-1, -2) if b_t else b)
    c = np.random.default_rng(1).standard_normal(product.shape)
    np.testing.assert_allclose(run_op(MatMul(a_t, b_t), a, b, c)[0], product + c, rtol=1e-12, atol=1e-12)
    if rows == 3:
        check_vjp(lambda g, x, y, z: g.apply(MatMul(a_t, b_t), x, y, z), a, b, c)


def test_strides_that_blas_takes_and_others() -> None:
    a = TensorType(as_dtype("float32"), (8, 6))
    op = MatMul()
    assert op.accepts_strides(0, a, (24, 4))
    assert op.accepts_strides(0, a, (64, 4))
    assert op.accepts_strides(0, a, (4, 32))
    assert op.accepts_strides(0, a, (4, 100))
    assert not op.accepts_strides(0, a, (48, 8))
    assert not op.accepts_strides(0, a, (0, 4))
    assert not op.accepts_strides(0, a, (-24, 4))
    heads = TensorType(as_dtype("float32"), (2, 4, 16, 8))
    assert op.accepts_strides(0, heads, (16 * 32 * 4, 8 * 4, 32 * 4, 4))


def test_heads_side_by_side_are_not_copied() -> None:
    q = np.ones((2, 64, 4, 32), np.float32).transpose(0, 2, 1, 3)
    assert allocated_bytes(MatMul(False, True), q, q) < 16 * 1024


def test_cost_is_two_a_multiply_add() -> None:
    a, b = _operands(((2, 1), (3,)), True, True)
    op = MatMul(True, True)
    assert op.cost([type_of(a), type_of(b)], op.infer([type_of(a), type_of(b)])).flops == 2 * 2 * 3 * 4 * 5 * 3
    (product,) = op.infer([type_of(a), type_of(b)])
    assert op.cost([type_of(a), type_of(b), product], [product]).flops == (2 * 5 + 1) * 2 * 3 * 4 * 3


def test_what_does_not_fit_is_refused() -> None:
    for told, *types in (
        ("inner extents differ", "float32[2,3]", "float32[4,5]"),
        ("two operands of one element type", "float32[3]", "float32[3,5]"),
        ("two operands of one element type", "float32[2,3]", "float64[3,5]"),
        ("product is added to must be", "float32[2,3]", "float32[3,5]", "float32[2,4]"),
        ("broadcast", "float32[2,4,3]", "float32[3,3,5]"),
    ):
        refused(told, MatMul(), *types)
