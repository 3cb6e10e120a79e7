"""Products to which a bias is added: cuBLASLt's calls, run by NumPy, and launches of ours, against the op."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from foreplan.gpu.launch import Launch, Multiply, workspace_at
from foreplan.gpu.table import OWN, kernel_named, kernels_for
from foreplan.graph import Window
from foreplan.ops.matmul_map import MatMulMap
from tests.gpu.binder import needs_gcc
from tests.gpu.check import DEVICE, check, run, type_of

pytestmark = needs_gcc
RNG = np.random.default_rng(0)
NAMES = [OWN, "cublaslt 0"]
PLAIN, RESIDUAL = MatMulMap(("(a0 + a1)",), False, True), MatMulMap(("(a2 + (a0 + a1))",), False, True)
NARROW = MatMulMap(("bfloat16((float32(a2) + (float32(a0) + a1)))",), False, True)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lead", [(5,), (2, 7), (1,), (2, 1, 3)], ids=str)
def test_float32(lead: tuple[int, ...], name: str) -> None:
    x, w, bias, added = f32(*lead, 9), f32(6, 9), f32(6), f32(*lead, 6)
    check(PLAIN, *(x if x.ndim > 1 else x[None], w, bias), name=name)
    check(RESIDUAL, x if x.ndim > 1 else x[None], w, bias, added if x.ndim > 1 else added[None], name=name)


@pytest.mark.parametrize("name", NAMES)
def test_the_result_takes_the_bytes_of_what_is_added(name: str) -> None:
    check(RESIDUAL, f32(2, 5, 9), f32(6, 9), f32(6), f32(2, 5, 6), over=(0, 3), name=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_wide_bias_of_a_narrow_product(name: str) -> None:
    """Which cuBLASLt takes in the product's type: beside float64 sums, within what bfloat16 rounds."""
    x, w, added = (f32(*shape).astype(ml_dtypes.bfloat16) for shape in ((40, 64), (24, 64), (40, 24)))
    bias = f32(24)
    (found,) = run(NARROW, [x, w, bias, added], name=name)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias + added.astype(np.float64)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2.0**-7, atol=2.0**-4)


def kernels(op: MatMulMap, *arrays: np.ndarray, windows: list[Window] | None = None) -> dict[str, object]:
    given = windows or [Window.dense(type_of(x)) for x in arrays]
    return dict(kernels_for(op, given, [Window.dense(type) for type in op.infer([x.type for x in given])], DEVICE))


def test_what_it_comes_to() -> None:
    """One call; of a wide bias, a copy of it before."""
    found = kernels(PLAIN, f32(5, 600), f32(6, 600), f32(6))
    assert list(found) == ["cublaslt", "cublaslt 0", OWN]
    kernel = found["cublaslt 0"]
    assert [type(each) for each in kernel.instructions] == [Multiply] and kernel.alignment == 16  # type: ignore[attr-defined]
    x, w = (f32(*shape).astype(ml_dtypes.bfloat16) for shape in ((5, 600), (600, 600)))
    narrow = kernels(MatMulMap(("bfloat16((float32(a0) + a1))",), False, True), x, w, f32(600))
    first, last = narrow["cublaslt"].instructions  # type: ignore[attr-defined]
    assert isinstance(first, Launch) and isinstance(last, Multiply)
    assert last.bias == workspace_at(0) and last.workspace == workspace_at(1280)
    assert narrow["cublaslt"].workspace == 1280 + last.nbytes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "expr", ["relu((a0 + a1))", "(a0 - a1)", "(a0 + (a1 + a1))", "(a0 * a1)", "((a0 + a0) + a1)", "a0"]
)
def test_what_is_no_bias(expr: str) -> None:
    inputs = [f32(5, 9), f32(6, 9), f32(6)] if "a1" in expr else [f32(5, 9), f32(6, 9)]
    assert not kernels(MatMulMap((expr,), False, True), *inputs)


def test_other_shapes_are_no_bias() -> None:
    for shape in ((), (1,), (5, 1), (5, 6)):
        assert not kernels(PLAIN, f32(5, 9), f32(6, 9), f32(*shape))
    two = MatMulMap(("(a0 + (a1 + a2))",), False, True)
    assert not kernels(two, f32(5, 9), f32(6, 9), f32(6), f32(6))


def test_several_products_have_kernels_of_ours_alone() -> None:
    op = MatMulMap(("(a0 + a1)",))
    assert list(kernels(op, f32(3, 5, 9), f32(3, 9, 6), f32(6))) == [OWN]
    check(op, f32(3, 5, 9), f32(3, 9, 6), f32(6))


def test_a_name_of_no_kernel() -> None:
    windows = [Window.dense(type_of(x)) for x in (f32(5, 9), f32(6, 9), f32(6))]
    outputs = [Window.dense(type) for type in PLAIN.infer([x.type for x in windows])]
    assert kernel_named(PLAIN, "cublaslt", b"", windows, outputs, DEVICE) is None  # nine terms are not split
