"""Convolutions of one tap as products by cuBLASLt: strides, cropped images, and how they compare with other kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from foreplan.graph import DType, Op
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES, FLOAT32, Shape, TensorType
from foreplan.ops.conv.ops import Conv
from foreplan.runtime.cuda.kernels.lt import lt_kernels
from foreplan.runtime.cuda.launch import Clear, Copy, Instruction, Launch, LaunchKernel, Multiply
from foreplan.runtime.cuda.table import kernel_named
from foreplan.runtime.cuda.target import CudaTarget
from tests.engines.engine import of_type
from tests.engines.test_convolution import NEAR, gradients, lying
from tests.gpu.check import DEVICE, by_cublaslt, made
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal
from tests.ops.check import type_of

KINDS = ("conv", "data gradient", "weight gradient")
DOWN = Conv((2, 2), ((0, 0), (0, 0)), (1, 1))  # as where ResNet halves an extent
EVEN, ODD = (32, 256, 56, 56), (32, 256, 55, 55)  # its images, and others whose rows do not lie evenly
CUDA = {name: of_type("cuda", name) for name in ("float32", "bfloat16", "float16")}


def ops_of(conv: Conv, images: Shape, filters: int) -> dict[str, tuple[Op, list[Shape], Shape]]:
    """The convolution and its gradients: each op, the shapes of its inputs, and that of its result."""
    x, w = (np.empty(shape, np.float32) for shape in (images, (filters, images[1], *[1] * (len(images) - 2))))
    (y,) = conv.infer([type_of(x), type_of(w)])
    data, weight = gradients(conv, x, w)
    shapes = ([x.shape, w.shape], y.shape), ([y.shape, w.shape], x.shape), ([x.shape, y.shape], w.shape)
    return {kind: (op, *each) for kind, op, each in zip(KINDS, (conv, data, weight), shapes)}


def drawn(rng: np.random.Generator) -> tuple[Conv, Shape, int]:
    """Strides, images that may be cropped, and at times enough of them for one product."""
    axes = int(rng.integers(1, 4))
    crops = rng.integers(0, 2, (axes, 2)) * int(rng.random() < 0.3)
    conv = Conv(
        tuple(map(int, rng.integers(1, 4, axes))), tuple((-int(low), -int(high)) for low, high in crops), (1,) * axes
    )
    spatial = map(int, rng.integers(3, 9 if axes < 3 else 6, axes))
    return conv, (int(rng.choice([1, 2, 40])), int(rng.integers(2, 18)), *spatial), int(rng.integers(1, 18))


@needs_gcc
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("dtype", CUDA)
@pytest.mark.parametrize("seed", range(4))
def test_drawn_geometries(seed: int, dtype: str, last: bool) -> None:
    """Alone, with a summand, and with one in whose place the result lies."""
    conv, images, filters = drawn(np.random.default_rng((seed, last)))
    for kind, (op, shapes, result) in ops_of(conv, images, filters).items():
        x, w, added = (normal(*shape, seed=i) for i, shape in enumerate((*shapes, result)))
        weights = added if kind == "weight gradient" else w
        for given, over in (([x, w], None), ([x, w, added], None), ([x, w, added], (0, 2))):
            windows = lying(last or over is not None, weights, *given)
            CUDA[dtype].check(op, *given, windows=windows, over=over, **NEAR)
            if last:
                assert by_cublaslt(op, *made(op, [type_of(each) for each in given], windows)[1:])


def kernels(
    kind: str, images: Shape, added: bool = False, dtype: DType = FLOAT32, conv: Conv = DOWN
) -> Mapping[str, LaunchKernel]:
    """Those of cuBLASLt for 512 filters, all images with their channels last."""
    op, shapes, result = ops_of(conv, images, 512)[kind]
    windows = [channels_last(TensorType(dtype, shape)) for shape in (*shapes, *[result] * added)]
    (y,) = op.infer([x.type for x in windows])
    found = lt_kernels(op, windows, [channels_last(y)], DEVICE)
    for name, kernel in found.items():
        again = kernel_named(op, name, b"", windows, [channels_last(y)], DEVICE)
        assert again is not None and (again.instructions, again.workspace) == (kernel.instructions, kernel.workspace)
    return found


def kinds_of(instructions: tuple[Instruction, ...]) -> list[type[Instruction]]:
    return [type(each) for each in instructions]


def test_elements_of_images_are_read_and_written_where_they_lie() -> None:
    """One product for each column of windows: rows of an even number of elements lie evenly over all images."""
    for kind, added, wanted in (
        ("conv", False, [Multiply]),
        ("conv", True, [Multiply]),
        ("data gradient", False, [Clear, Multiply]),
        ("data gradient", True, [Copy, Multiply]),
    ):
        kernel = kernels(kind, EVEN, added)["cublaslt 0"]
        assert kinds_of(kernel.instructions) == wanted and kernel.workspace == 0
        assert kernel.overwrites == (((0, 2),) if added else ())
        call = kernel.instructions[-1]
        assert isinstance(call, Multiply)
        assert (call.batch, call.d.columns, call.adds) == (28, 32 * 28, added)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_are_gathered_before_a_product_and_spread_behind_one(dtype: str) -> None:
    """In a workspace of just their size; sums to which something is added are rounded at the end."""
    item, sums = DTYPES[dtype].itemsize, 32 * 256 * 28 * 28
    for kind, images, added, wanted, nbytes in (
        ("conv", ODD, False, [Launch, Multiply], item * sums),
        ("weight gradient", EVEN, False, [Launch, Multiply], item * sums),
        ("weight gradient", EVEN, True, [Launch, Multiply], item * sums),
        ("data gradient", ODD, False, [Clear, Multiply, Launch], item * sums),
        ("data gradient", ODD, True, [Copy, Multiply, Launch], 4 * sums),
    ):
        kernel = kernels(kind, images, added, DTYPES[dtype])["cublaslt 0"]
        assert kinds_of(kernel.instructions) == wanted and kernel.workspace == nbytes
        (call,) = (each for each in kernel.instructions if isinstance(each, Multiply))
        assert call.batch == 1
        for name, scratch in kernels(kind, images, added, DTYPES[dtype]).items():
            (call,) = (each for each in scratch.instructions if isinstance(each, Multiply))
            assert scratch.workspace == nbytes + call.nbytes, name


def test_few_rows_are_gathered() -> None:
    """Products of a batch that leave most of a tile empty."""
    assert kinds_of(kernels("conv", (2, 256, 56, 56))["cublaslt 0"].instructions) == [Launch, Multiply]
    assert kinds_of(kernels("conv", (4, 256, 56, 56))["cublaslt 0"].instructions) == [Multiply]


def test_windows_in_the_padding_are_left_to_others() -> None:
    """Which have no element of the images; padding behind the last window changes nothing."""
    assert not kernels("data gradient", EVEN, conv=Conv((2, 2), ((1, 0), (0, 0)), (1, 1)))
    assert not kernels("conv", ODD, conv=Conv((2, 2), ((0, 2), (0, 0)), (1, 1)))
    assert kernels("conv", ODD, conv=Conv((2, 2), ((0, 1), (0, 0)), (1, 1)))
    assert not kernels("conv", EVEN, dtype=DTYPES["float64"])


def test_what_is_moved_is_priced() -> None:
    """Zeros that are written once; gathered elements that are read and written."""

    def nanoseconds(kind: str, images: Shape, conv: Conv = DOWN) -> int:
        return kernels(kind, images, conv=conv)["cublaslt 0"].nanoseconds or 0

    plain = Conv((1, 1), ((0, 0), (0, 0)), (1, 1))
    written = 4 * 32 * 256 * 56 * 56 / DEVICE.bytes_per_second * 1e9
    gap = nanoseconds("data gradient", EVEN) - nanoseconds("conv", EVEN)
    assert gap == pytest.approx(written, rel=0.1)
    gap = nanoseconds("weight gradient", EVEN) - nanoseconds("weight gradient", (32, 256, 28, 28), plain)
    assert gap == pytest.approx(written / 2, rel=1e-3)


@pytest.mark.parametrize("extent", [56, 28, 14])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_takes_them_in_float32(kind: str, extent: int) -> None:
    """On an H200, cuDNN's kernels took 0.8 to 4 ms for data gradients of ResNet-50's, batch 32, and products 0.15."""
    channels = 56 * 256 // extent
    op, shapes, _ = ops_of(DOWN, (32, channels, extent, extent), 2 * channels)[kind]
    windows = [channels_last(TensorType(FLOAT32, shape)) for shape in shapes]
    target, (y,) = CudaTarget("h200"), op.infer([x.type for x in windows])
    first = target.kernels(op, windows, target.layouts(op, windows, [y]))[0]
    assert first.name.startswith("cublaslt") and first.nanoseconds < 200_000
