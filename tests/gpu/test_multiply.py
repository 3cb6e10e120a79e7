"""Matrix products by cuBLASLt: which calls it comes to, how they are named, and prices."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, TensorType, Window
from foreplan.graph.types import DTYPES, tensor_type
from foreplan.ops.matmul import MatMul
from foreplan.ops.reduce import Reduce
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.kernels.lt import lt_kernels
from foreplan.runtime.cuda.launch import Arithmetic, LaunchKernel, Multiply
from foreplan.runtime.cuda.table import OWN, kernel_named, kernels_for
from tests.gpu.check import DEVICE, type_of

RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def found(op: Op, windows: list[Window], tf32: bool = False) -> dict[str, LaunchKernel]:
    outputs = [Window.dense(type) for type in op.infer([x.type for x in windows])]
    return dict(lt_kernels(op, windows, outputs, DEVICE, tf32=tf32))


def calls(op: Op, *inputs: np.ndarray, windows: list[Window] | None = None) -> list[Multiply]:
    """Those of each kernel; all kernels make as many."""
    kernels = found(op, windows or [Window.dense(type_of(x)) for x in inputs]).values()
    several = [[call for call in kernel.instructions if isinstance(call, Multiply)] for kernel in kernels]
    assert several and all(len(each) == len(several[0]) for each in several)
    return several[0]


def only(kernel: LaunchKernel) -> Multiply:
    (call,) = kernel.instructions
    assert isinstance(call, Multiply)
    return call


def test_sequences_first_are_few_products_of_many_rows() -> None:
    """Items of a batch beside one another at each time, as PyTorch's attention turns them: not one product a time."""
    x, w = Window.dense(type_of(f32(4, 197, 8))), Window.dense(type_of(f32(8, 6)))
    turned = x.viewed((197, 4, 8), (x.strides[1], x.strides[0], x.strides[2]))
    (call,) = calls(MatMul(), windows=[turned, w])
    assert (call.batch, call.d.columns) == (4, 197)


@pytest.mark.parametrize(
    ("a", "b", "batch", "count"),
    [
        ((3, 5, 7), (3, 7, 6), 3, 1),
        ((2, 3, 5, 7), (7, 6), 1, 1),
        ((2, 3, 5, 7), (1, 1, 7, 6), 1, 1),
        ((5, 7), (4, 7, 6), 4, 1),
        ((2, 3, 5, 7), (2, 3, 7, 6), 6, 1),
        ((2, 1, 5, 7), (3, 7, 6), 3, 2),
        ((4, 1, 5, 7), (3, 7, 6), 4, 3),
        ((1, 5, 7), (2, 1, 7, 6), 2, 1),
    ],
)
def test_batches(a: tuple[int, ...], b: tuple[int, ...], batch: int, count: int) -> None:
    for rest in ([], [f32(*np.broadcast_shapes(a[:-2], b[:-2]), 5, 6)]):
        assert [call.batch for call in calls(MatMul(), f32(*a), f32(*b), *rest)] == [batch] * count


def test_rows_of_all_batches_make_one_product_where_they_share_b() -> None:
    (call,) = calls(MatMul(False, True), f32(8, 16, 32), f32(48, 32))
    assert (call.d.rows, call.d.columns, call.terms, call.batch) == (48, 128, 32, 1)
    (turned,) = calls(MatMul(True), f32(8, 32, 16), f32(32, 48))  # whose rows do not lie one behind the other
    assert (turned.d.rows, turned.d.columns, turned.batch, turned.a.stride) == (48, 16, 8, 0)


def test_positions_of_images_in_c_order_make_rows() -> None:
    """Of channels that come last in the shape alone: one product an image, not one for each row of its positions."""
    x, w = f32(64, 7, 7, 20), f32(20, 30)
    windows = [Window(type_of(x), (20 * 49 * 4, 7 * 4, 4, 49 * 4)), Window.dense(type_of(w))]
    (call,) = calls(MatMul(), windows=windows)
    assert (call.d.rows, call.d.columns, call.terms, call.batch) == (30, 49, 20, 64)
    assert (call.transpose_b, call.b.leading) == (True, 49)
    one = Window(type_of(f32(3, 5, 1, 20)), (20 * 4, 0, 0, 4))  # a row of each, over and over
    assert [call.batch for call in calls(MatMul(), windows=[one, windows[1]])] == [5] * 3


def test_views() -> None:
    """Heads of packed rows; every other row; columns of a wider matrix; what is added to has gaps."""
    x, w = f32(2, 3, 9, 16), f32(2, 3, 16, 9)
    heads = Window(type_of(x), (9 * 48 * 4, 16 * 4, 48 * 4, 4))
    assert len(calls(MatMul(), x, w, windows=[heads, Window.dense(type_of(w))])) == 2
    assert len(calls(MatMul(False, True), x, x, windows=[heads, heads])) == 2
    a, b, c = (type_of(f32(*shape)) for shape in ((5, 7), (7, 6), (5, 6)))
    far, wide, turned = Window(a, (9 * 4, 4)), Window(b, (20 * 4, 4)), Window(a, (4, 8 * 4))
    apart = Window(c, (10 * 4, 4))
    assert not calls(MatMul(), windows=[far, wide])[0].adds and calls(MatMul(), windows=[turned, wide, apart])[0].adds
    assert all(not kernel.overwrites for kernel in found(MatMul(), [far, wide, apart]).values())


def test_what_blas_has_no_words_for() -> None:
    a, b = type_of(f32(5, 7)), type_of(f32(7, 6))
    dense = [Window.dense(a), Window.dense(b)]
    assert found(MatMul(), dense)
    assert not found(MatMul(), [Window(a, (14 * 4, 2 * 4)), dense[1]])  # gaps in rows and columns
    assert not found(MatMul(), [Window(a, (0, 4)), dense[1]])  # one row, over and over
    assert not found(MatMul(), [Window(a, (-7 * 4, 4)), dense[1]])
    assert not found(MatMul(), [*dense, Window(type_of(f32(5, 6)), (4, 5 * 4))])  # column by column, the result is not
    assert not found(MatMul(), [Window.dense(type_of(np.zeros(s))) for s in ((5, 7), (7, 6))])
    assert not found(MatMul(), [Window.dense(type_of(f32(*s))) for s in ((5, 0), (0, 6))])
    assert not found(MatMul(), [Window.dense(type_of(f32(*s))) for s in ((0, 5), (5, 6))])
    many = [Window.dense(type_of(f32(*s))) for s in ((17, 1, 2, 2), (18, 2, 2))]
    assert not found(MatMul(), many)
    assert not found(Reduce("sum", (0,)), dense[:1])
    bf16 = [TensorType(DTYPES["bfloat16"], s) for s in ((5, 7), (7, 6))]
    windows = [Window.dense(type) for type in bf16]
    (y,) = MatMul().infer(bf16)
    assert not lt_kernels(MatMul(), windows, [Window.dense(y)], device_named("t4"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wide_results_of_narrow_types(dtype: str) -> None:
    (wide,) = calls(MatMul(wide=True), windows=[Window.dense(tensor_type(f"{dtype}[{s}]")) for s in ("33,20", "20,7")])
    assert (wide.a.dtype, wide.d.dtype) == (DTYPES[dtype], DTYPES["float32"])


def test_tensorfloat32_is_asked_for_by_name() -> None:
    dense = [Window.dense(type_of(f32(*s))) for s in ((40, 600), (600, 30))]
    strict, rounded = found(MatMul(), dense), found(MatMul(), dense, tf32=True)
    assert list(strict) == ["cublaslt", "cublaslt 0"] and list(rounded) == ["cublaslt tf32", "cublaslt tf32 0"]
    assert not any(only(kernel).tf32 for kernel in strict.values())
    assert all(only(kernel).tf32 for kernel in rounded.values())
    narrow = [Window.dense(TensorType(DTYPES["bfloat16"], x.shape)) for x in dense]
    assert list(found(MatMul(), narrow, tf32=True)) == list(strict)
    (y,) = MatMul().infer([x.type for x in dense])
    before = lt_kernels(MatMul(), dense, [Window.dense(y)], device_named("t4"), tf32=True)
    assert list(before) == list(strict)


def test_scratch_memory_is_what_is_advised_or_less() -> None:
    """32 MiB on Hopper and Blackwell of data centres, 4 MiB on others; no more than parts of a small result take, and
    none where sums are too short to be split, or tiles fill the card.
    """

    def rooms(card: str, *shapes: tuple[int, ...]) -> list[int]:
        windows = [Window.dense(type_of(np.zeros(s, np.float32))) for s in shapes]
        (y,) = MatMul().infer([x.type for x in windows])
        kernels = lt_kernels(MatMul(), windows, [Window.dense(y)], device_named(card))
        assert all(kernel.workspace == only(kernel).nbytes for kernel in kernels.values())
        return [kernel.workspace for kernel in kernels.values()]

    large = ((2048, 4096), (4096, 2048))
    assert [rooms(card, *large) for card in ("h100", "b200")] == [[32 << 20, 0]] * 2
    assert [rooms(card, *large) for card in ("a100", "l4", "rtx5090")] == [[4 << 20, 0]] * 3
    assert rooms("h100", (5, 1024), (1024, 7)) == [2304, 0]  # four times four parts of 5 x 7 float32, a multiple of 256
    assert rooms("h100", (2048, 64), (64, 2048)) == [0]
    assert rooms("h100", (64 * 132, 4096), (4096, 64)) == [0]


def test_a_plan_names_its_kernel_and_needs_no_library_for_that() -> None:
    windows = [Window.dense(type_of(f32(*s))) for s in ((64, 1024), (1024, 64))]
    outputs = [Window.dense(type) for type in MatMul().infer([x.type for x in windows])]
    kernels = kernels_for(MatMul(), windows, outputs, DEVICE)
    assert list(kernels) == ["cublaslt", "cublaslt 0", OWN]
    for name, kernel in kernels.items():
        again = kernel_named(MatMul(), name, b"", windows, outputs, DEVICE)
        assert again is not None
        assert (again.instructions, again.workspace) == (kernel.instructions, kernel.workspace)
    for name in ("cublaslt 1", "cublaslt 0 tf32", "cublaslt  0", "cublas"):
        assert kernel_named(MatMul(), name, b"", windows, outputs, DEVICE) is None
    assert kernel_named(MatMul(), "cublaslt", b"x", windows, outputs, DEVICE) is None
    assert kernel_named(Reduce("sum", (0,)), "cublaslt", b"", windows[:1], outputs, DEVICE) is None


def test_prices() -> None:
    """By the peak for the type; ours last; scratch memory pays where the result is small and sums are long."""

    def prices(dtype: str, tf32: bool, *shapes: tuple[int, ...]) -> list[int]:
        windows = [Window.dense(TensorType(DTYPES[dtype], s)) for s in shapes]
        outputs = [Window.dense(type) for type in MatMul().infer([x.type for x in windows])]
        kernels = kernels_for(MatMul(), windows, outputs, DEVICE, Arithmetic(tf32))
        return [kernel.nanoseconds or 0 for kernel in kernels.values()]

    cube = ((8192, 8192), (8192, 8192))
    reached = (("float32", False, 0.7 * 66.9), ("float32", True, 0.5 * 494.7), ("bfloat16", False, 0.62 * 989.4))
    for dtype, tf32, rate in reached:
        best, without, ours = prices(dtype, tf32, *cube)
        assert best < without < ours
        assert best == pytest.approx(2 * 8192**3 / (rate * 1e12) * 1e9, rel=1e-4)
    best, without, _ = prices("float32", False, (64, 16384), (16384, 64))
    assert without > 10 * best
    lines = [min(prices("bfloat16", False, (4096, n), (n, 4096))) for n in (384, 385)]
    assert lines[1] > 3 * lines[0]  # which then begin at odd multiples of two bytes
    assert len(set(prices("float32", False, (1, 4096), (4096, 4096)))) == 1  # however it is done, b must be read
