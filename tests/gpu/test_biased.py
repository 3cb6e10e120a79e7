"""Products to which a bias is added: cuBLASLt's calls, run by NumPy, and launches of ours, against the op."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.matmul_map import MatMulMap
from foreplan.runtime.cuda.launch import Launch, LaunchKernel, Multiply, workspace_at
from foreplan.runtime.cuda.table import OWN, kernel_named, kernels_for
from foreplan.runtime.cuda.target import CudaTarget
from tests.engines.engine import ENGINES
from tests.gpu.check import DEVICE, run, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)
CUDA = ENGINES["cuda"]
PLAIN, RESIDUAL = MatMulMap(("(a0 + a1)",), False, True), MatMulMap(("(a2 + (a0 + a1))",), False, True)
NARROW = MatMulMap(("bfloat16((float32(a2) + (float32(a0) + a1)))",), False, True)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("lead", [(5,), (2, 7), (1,), (2, 1, 3)], ids=str)
def test_a_bias_and_what_else_is_added_perhaps_in_its_place(lead: tuple[int, ...]) -> None:
    given = [f32(*lead, 9), f32(6, 9), f32(6)]
    CUDA.check(PLAIN, *given)
    CUDA.check_over(RESIDUAL, [*given, f32(*lead, 6)], None, (0, 3))


@pytest.mark.parametrize("name", [OWN, "cublaslt 0"])
def test_a_wide_bias_of_a_narrow_product(name: str) -> None:
    """Which cuBLASLt takes in the product's type: beside float64 sums, within what bfloat16 rounds."""
    x, w, added = (f32(*shape).astype(ml_dtypes.bfloat16) for shape in ((40, 64), (24, 64), (40, 24)))
    bias = f32(24)
    (found,) = run(NARROW, [x, w, bias, added], name=name)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias + added.astype(np.float64)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2.0**-7, atol=2.0**-4)


def kernels(op: MatMulMap, *arrays: np.ndarray, windows: list[Window] | None = None) -> dict[str, LaunchKernel]:
    given = windows or [Window.dense(type_of(x)) for x in arrays]
    return dict(kernels_for(op, given, [Window.dense(type) for type in op.infer([x.type for x in given])], DEVICE))


def test_what_it_comes_to() -> None:
    """A copy of the bias, and one call."""
    found = kernels(PLAIN, f32(5, 600), f32(6, 600), f32(6))
    assert list(found) == ["cublaslt", "cublaslt 0", OWN]
    kernel = found["cublaslt 0"]
    assert [type(each) for each in kernel.instructions] == [Launch, Multiply] and kernel.workspace == 24
    x, w = (f32(*shape).astype(ml_dtypes.bfloat16) for shape in ((5, 600), (600, 600)))
    narrow = kernels(MatMulMap(("bfloat16((float32(a0) + a1))",), False, True), x, w, f32(600))
    first, last = narrow["cublaslt"].instructions
    assert isinstance(first, Launch) and isinstance(last, Multiply)
    assert last.bias == workspace_at(0) and last.workspace == workspace_at(1280)
    assert narrow["cublaslt"].workspace == 1280 + last.nbytes


@pytest.mark.parametrize(
    "expr",
    [
        "relu((a0 + a1))",
        "(a0 - a1)",
        "(a0 + (a1 + a1))",
        "(a0 * a1)",
        "((a0 + a0) + a1)",
        "a0",
        "float32(float16((a0 + a1)))",  # which rounds
    ],
)
def test_what_is_no_bias(expr: str) -> None:
    inputs = [f32(5, 9), f32(6, 9), f32(6)] if "a1" in expr else [f32(5, 9), f32(6, 9)]
    assert not kernels(MatMulMap((expr,), False, True), *inputs)


def test_other_shapes_are_no_bias() -> None:
    for shape in ((), (1,), (5, 1), (5, 6)):
        assert not kernels(PLAIN, f32(5, 9), f32(6, 9), f32(*shape))
    two = MatMulMap(("(a0 + (a1 + a2))",), False, True)
    assert not kernels(two, f32(5, 9), f32(6, 9), f32(6), f32(6))


def fuses(op: MatMulMap, *arrays: np.ndarray) -> bool:
    types = [type_of(x) for x in arrays]
    return CudaTarget("h100").fuses(op, types, op.infer(types))


def test_what_cublaslt_does_not_add_stays_a_map() -> None:
    """Several products; results of other types than it has; nothing that it multiplies."""
    op = MatMulMap(("(a0 + a1)",))
    assert fuses(op, f32(5, 9), f32(9, 6), f32(6)) and fuses(op, f32(3, 5, 9), f32(9, 6), f32(6))
    assert not fuses(op, f32(3, 5, 9), f32(3, 9, 6), f32(6))
    for result in ("float64", "float16", "bfloat16"):
        assert not fuses(MatMulMap((f"{result}((a0 + a1))",)), f32(5, 9), f32(9, 6), f32(6))
    assert not fuses(op, f32(5, 9), f32(9, 6), f32(6).astype(np.float64))
    assert not fuses(op, *(x.astype(np.float64) for x in (f32(5, 9), f32(9, 6), f32(6))))


def test_where_tensors_lie_otherwise_a_map_follows_the_product() -> None:
    """Rows that do not lie evenly, and several products, which are fused when they lie in C order."""
    x, w, bias = f32(3, 5, 9), f32(9, 6), f32(6)
    apart = [Window(type_of(x), (7 * 36, 36, 4)), *(Window.dense(type_of(each)) for each in (w, bias))]
    op = MatMulMap(("(a0 + a1)",))
    CUDA.check(op, x, w, bias, windows=apart)
    first, *_, last = kernels(op, x, w, bias, windows=apart)["cublaslt 0"].instructions
    assert isinstance(first, Multiply) and first.bias is None and isinstance(last, Launch)
    CUDA.check(op, f32(3, 5, 9), f32(3, 9, 6), f32(6))
    added = f32(3, 5, 6)
    lying = [*apart, Window.dense(type_of(added))]
    CUDA.check(MatMulMap(("(a2 + (a0 + a1))",)), x, w, bias, added, windows=lying, over=(0, 3))


def test_a_name_of_no_kernel() -> None:
    windows = [Window.dense(type_of(x)) for x in (f32(5, 9), f32(6, 9), f32(6))]
    outputs = [Window.dense(type) for type in PLAIN.infer([x.type for x in windows])]
    assert kernel_named(PLAIN, "cublaslt", b"", windows, outputs, DEVICE) is None  # nine terms are not split
