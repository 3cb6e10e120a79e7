"""Cross-entropy fused with the matrix that makes the logits."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import DTYPES
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.runtime.cuda.kernels.linear_cross_entropy import lt_kernels
from foreplan.runtime.cuda.launch import LaunchKernel, Multiply
from foreplan.runtime.cuda.table import OWN
from tests.engines.test_linear_cross_entropy import operands
from tests.gpu.check import DEVICE, check, run
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = needs_gcc


def case(rows: int, depth: int, classes: int, dtype: str = "float32") -> list[np.ndarray]:
    h, w, target = operands(rows, depth, classes)
    target[::4] = -100
    return [h.astype(DTYPES[dtype].numpy), w.astype(DTYPES[dtype].numpy), target]


def by_cublaslt(
    op: LinearCrossEntropy, shapes: list[tuple[int, ...]], dtype: str = "bfloat16", tf32: bool = False
) -> dict[str, LaunchKernel]:
    """Kernels with products by cuBLASLt."""
    types = [TensorType(DTYPES["int64" if len(shape) == 1 else dtype], shape) for shape in shapes]
    windows, outputs = ([Window.dense(type) for type in found] for found in (types, op.infer(types)))
    return dict(lt_kernels(op, windows, outputs, DEVICE, tf32=tf32))


@pytest.mark.parametrize("wide", [True, False])
def test_narrow_products_by_cublaslt(wide: bool) -> None:
    """What is multiplied is all of one type; with a bias, the loss is as near as that of float32 logits."""
    given, op = [*case(20, 16, 40, "bfloat16"), normal(40)], LinearCrossEntropy(8, wide=wide)
    for name in ("cublaslt 8", OWN):
        check(op, *given, name=name, rtol=2e-2, atol=1e-2)
    (loss, *_), (wanted, *_) = (run(op, given, name=name) for name in ("cublaslt 16", OWN))
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for kernel in by_cublaslt(op, [(20, 16), (40, 16), (20,)]).values():
        calls = [each for each in kernel.instructions if isinstance(each, Multiply)]
        assert {(call.a.dtype.name, call.b.dtype.name) for call in calls} == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize("classes", [40, 300, 1101])
def test_narrow_logits_are_rounded_once(classes: int) -> None:
    """As where a product makes them for another op: the loss and its gradients are those of rounded logits."""
    narrow = DTYPES["bfloat16"].numpy
    h, w, target = case(20, 16, classes, "bfloat16")
    exact = h.astype(np.float64) @ w.astype(np.float64).T
    logits = exact.astype(np.float32).astype(narrow).astype(np.float64)
    counts = target != -100
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    picked = np.arange(20)[counts], target[counts]
    wanted = -np.log(p[picked]).mean()
    p[picked] -= 1
    gradient = (p * counts[:, None] / counts.sum()).astype(np.float32).astype(narrow).astype(np.float64)
    for name in ("cublaslt 8", "cublaslt 16", "cublaslt 32"):
        loss, dh, dw = run(LinearCrossEntropy(8, wide=True), [h, w, target], name=name)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)  # of unrounded ones it is 8e-5 away or more
        np.testing.assert_allclose(dw, gradient.T @ h.astype(np.float64), rtol=1e-2, atol=1e-4)
        np.testing.assert_allclose(dh.astype(np.float64), gradient @ w.astype(np.float64), rtol=1e-2, atol=1e-4)


def test_chunks_for_cublaslt() -> None:
    """Twice as many rows at a time, up to all or eight times the op's own; rows begin where tensor cores want them."""
    found = by_cublaslt(LinearCrossEntropy(256, wide=True), [(4096, 768), (50257, 768), (4096,)])
    assert list(found) == [f"cublaslt {rows}" for rows in (256, 512, 1024, 2048)]
    for rows, kernel in zip((256, 512, 1024, 2048), found.values()):
        calls = [each for each in kernel.instructions if isinstance(each, Multiply)]
        # The last 17 classes go apart: the others' rows are multiples of what tensor cores take.
        assert len(calls) == 2 * 3 * 4096 // rows
        assert {x for call in calls for x in (call.d.rows, call.d.columns, call.terms)} == {768, rows, 50240, 17}
        # Logits, then their gradient, rows of 50,304; a loss an item, the weight, and scratch memory of at most 32 MiB.
        least = rows * 50304 * 2 + 4096 * 4
        assert least < kernel.workspace <= least + (32 << 20) + 1024
        assert all(matrix.leading % 8 == 0 for call in calls for matrix in (call.a, call.b, call.d))
        assert max(call.nbytes for call in calls) <= 32 << 20
    prices = [kernel.nanoseconds for kernel in found.values()]
    assert prices == sorted(prices, reverse=True)
    # Three products of 4,096 x 768 x 50,257 at 70 % of 989 TFLOP/s, and the rest is memory's.
    assert 1.37e6 < prices[-1] < prices[0] < 6e6
    few, one = ((LinearCrossEntropy(256), [(rows, 8), (70, 8), (rows,)]) for rows in (300, 9))
    assert list(by_cublaslt(*few)) == ["cublaslt 256", "cublaslt 512"]
    assert list(by_cublaslt(*one, "float32", tf32=True)) == ["cublaslt tf32 256"]
