"""Kernels of every kind: an op with inputs for each file of cuda/, and for each way in which it is made."""

from __future__ import annotations

from collections.abc import Iterator

from foreplan.graph import Op, TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.first_equal import FirstEqual
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.index_elements import GatherElements, ScatterElementsAdd
from foreplan.ops.join import Pad
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.map import Map
from foreplan.ops.map_scatter_add import MapScatterAdd
from foreplan.ops.matmul import MatMul
from foreplan.ops.multi_map import MultiMap
from foreplan.ops.norm.batch import BatchNormGrad, ChannelMoments
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNormGrad
from foreplan.ops.norm.sync import ChannelSums
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.random import Random
from foreplan.ops.reduce import Reduce
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.ops.scan import CumSum
from foreplan.ops.softmax import LogSoftmaxGrad, Softmax
from foreplan.ops.sort import ArgReduce, TopK
from foreplan.runtime.cuda.launch import Launch, LaunchKernel, holding
from foreplan.runtime.cuda.table import kernel_for
from tests.gpu.check import DEVICE, made

Sample = tuple[Op, list[TensorType]]


def of(dtype: str, *shapes: tuple[int, ...]) -> list[TensorType]:
    return [TensorType(DTYPES[dtype], shape) for shape in shapes]


def samples(dtype: str) -> Iterator[Sample]:
    """Ops on tensors of one floating-point type, with statistics in its wide type."""
    wide = DTYPES[dtype].wide.name
    image, filters = (2, 64, 32, 32), (64, 64, 3, 3)
    window = ((3, 3), (2, 2), ((0, 0), (0, 0)), (1, 1))
    strided = ((2, 2), ((1, 1), (1, 1)), (1, 1))
    plain = ((1, 1), ((1, 1), (1, 1)), (1, 1))
    vector, whole = of(wide, (64,)), of("int64", (32,))
    yield Map(("relu((((a0 - a1) * a2) + a3))",)), of(dtype, image, *[(64, 1, 1)] * 3)
    yield Map((f"{dtype}((({wide}(a0) * a1) + a2))",)), [*of(dtype, image), *of(wide, (64, 1, 1), (64, 1, 1))]
    yield Map(("(a0 - (a2 * (0.9 * a1)))", "(tanh(a0) * exp(a1))")), of(dtype, (4097,), (4097,), ())
    yield MaskedMap(("where(a0, a1, 0.0)",)), [*of("uint8", (2 * 64 * 128,)), *of(dtype, image)]
    yield PackBits("(a0 > 0)"), of(dtype, image)
    yield (
        MultiMap(("(a0 - (a3 * (a1 / sqrt(a2))))", "(a1 * a4)"), 3, 32),
        [*of(dtype, *[(300,)] * 96), *of(wide, (), ())],
    )
    yield Reduce("sum", (0, 2, 3)), of(dtype, image)
    yield Reduce("max", (1,)), of(dtype, (100, 1000))
    yield Reduce("prod", (0,)), of("bool", (40, 64))
    for rows, columns in ((4000, 768), (8, 4096), (70, 1002)):
        yield Reduce("sum", (0,)), of(dtype, (rows, columns))
    yield MatMul(), of(dtype, (3, 100, 200), (3, 200, 300))
    yield MatMul(True), of(dtype, (5000, 20), (5000, 30), (20, 30))
    yield Conv(*plain), [*of(dtype, image, filters), *vector]
    yield ConvDataGrad(*strided, spatial=(32, 32)), of(dtype, (2, 64, 16, 16), filters)
    yield (
        ConvDataGrad((1, 2, 1), ((0, 1),) * 3, (1, 1, 1), spatial=(4, 4, 4)),
        of(dtype, (1, 4, 4, 2, 4), (4, 3, 2, 2, 2)),
    )
    yield ConvWeightGrad(*plain, kernel=(3, 3)), of(dtype, image, image)
    yield ConvWeightGrad(*plain, groups=32, kernel=(3, 3)), of(dtype, image, image)
    for kernel, steps, many, gaps in ((3, 1, 64, 1), (5, 2, 64, 1), (7, 1, 64, 1), (3, 1, 128, 2), (8, 1, 64, 3)):
        alone = Conv((steps, steps), ((kernel // 2 * gaps, kernel // 2 * gaps),) * 2, (gaps, gaps), 64)
        x, w = of(dtype, (2, 64, 32, 32), (many, 1, kernel, kernel))
        (y,) = alone.infer([x, w])
        yield alone, [x, w, *of(wide, (many,))]
        yield ConvDataGrad(*alone.geometry, spatial=(32, 32)), [y, w]
        yield ConvWeightGrad(*alone.geometry, kernel=(kernel, kernel), wide=True), [x, y]
    yield ChannelMoments(), of(dtype, image)
    yield BatchNormGrad(1e-5), [*of(dtype, image), *vector * 3, *of(dtype, image)]
    yield ChannelSums(), [*of(dtype, image), *vector, *of(dtype, image)]
    one, two = "where(a0, a1, 0.0)", "where(a0, (a1 + a2), 0.0)"
    for expr, others, keeps in ((one, 1, True), (two, 2, False), (two, 2, True)):
        bits = of("uint8", (2 * 64 * 128,))
        yield (
            MaskedBatchNormGrad(1e-5, f"{dtype}({expr})", keeps),
            [*of(dtype, image), *vector * 3, *bits, *of(dtype, *[image] * others)],
        )
    close = ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    apart = ((5, 5), (3, 3), ((2, 2), (2, 2)), (1, 2))
    for geometry in (window, close, apart):
        y = MaxPool(*geometry).infer(of(dtype, image))[0]
        yield MaxPool(*geometry, save_index=True), of(dtype, image)
        yield MaxPoolGrad(*geometry, shape=image), [y.with_dtype(DTYPES["uint8"]), y]
        yield AvgPool(*geometry), of(dtype, image)
        yield AvgPoolGrad(*geometry, shape=image), [y]
    for mode in ("nearest", "linear", "cubic"):
        yield Resize((2, 64, 64, 48), mode), of(dtype, image)
        yield ResizeGrad((2, 64, 64, 48), mode, extents=image), of(dtype, (2, 64, 64, 48))
    yield Resize((2, 64, 5, 3), "cubic", exclude_outside=True, antialias=True), of(dtype, image)
    yield ResizeGrad((2, 64, 32, 32), extents=(2, 64, 1, 1)), of(dtype, image)
    yield Softmax(1), of(dtype, (32, 1000))
    yield LogSoftmaxGrad(1), of(dtype, (32, 10), (32, 10))
    yield CrossEntropy(1), [*of(dtype, (32, 1000)), *whole]
    yield CrossEntropy(1), [*of(dtype, (32, 50257)), *whole]
    yield CrossEntropyGrad(1), [*of(dtype, (32, 50257)), *whole, *of(wide, (32,), (32,))]
    yield CrossEntropyGrad(1), [*of(dtype, (32, 1000)), *whole, *of(wide, (32,), (32,))]
    for width in (768, 1024, 4095):
        rows = of(dtype, (32, width))
        yield LayerNorm(1, 1e-5), [*rows, *of(wide, (width,), (width,))]
        for added in ([], rows):
            yield LayerNormGrad(1), [*rows, *of(wide, (width,), (32,), (32,)), *rows, *added]
    yield LayerNorm(1, 1e-5), [*of(dtype, (5, 1)), *of(wide, (1,), (1,))]
    yield LayerNormGrad(1), [*of(dtype, (5, 1)), *of(wide, (1,), (5,), (5,)), *of(dtype, (5, 1))]
    yield RMSNormGrad(1), [*of(dtype, (32, 100)), *of(wide, (100,), (32,)), *of(dtype, (32, 100))]
    yield Pad(((0, 0), (0, 0), (1, 2), (3, 0))), of(dtype, image)
    yield Gather(0), [*of(dtype, (100, 64)), *whole]
    yield ScatterAdd(0, (100, 64)), [*whole, *of(dtype, (32, 64))]
    yield ScatterAdd(0, (50_000, 64)), [*of("int64", (5000,)), *of(dtype, (5000, 64), (50_000, 64))]
    yield ScatterAdd(0, (2, 64)), [*of("int64", (10_000,)), *of(dtype, (10_000, 64))]
    yield ScatterAdd(1, (4, 2, 64)), [*whole, *of(dtype, (4, 32, 64))]
    given = [*of("int64", (5000,)), *of(dtype, (5000, 64), *[(50_000, 64)] * 2, ())]
    yield FirstEqual(50_000), of("int64", (5000,))
    yield MapScatterAdd(0, (50_000, 64), "(a0 - (a2 * a1))"), given
    heads = [(2, 4, 100, 64), (2, 2, 120, 64), (2, 2, 120, 64)]
    mask, log_sum = (1, 1, 100, 120), (2, 4, 100)
    yield Attention(0.125, True), of(dtype, *heads)
    given = [*of(dtype, *heads, heads[0]), *of(wide, log_sum), *of(dtype, heads[0], mask)]
    yield AttentionGrad(0.125, mask_gradient=True), given
    given = [*of(dtype, (2, 40, 3 * 64), (2, 40, 1, 64)), *of(wide, (2, 1, 40)), *of(dtype, (2, 40, 1, 64))]
    yield PackedAttentionGrad(0.1, 1, 1, True), given
    long = [(1, 2, 40, 128)] * 3
    yield AttentionGrad(0.1, True), [*of(dtype, *long, long[0]), *of(wide, (1, 2, 40)), *of(dtype, long[0])]
    given = [*of(dtype, (300, 64), (1000, 64)), *of("int64", (300,)), *of(wide, (1000,))]
    yield LinearCrossEntropy(256), given
    yield CumSum(1), of(dtype, (100, 64))
    yield ArgReduce("max", 1), of(dtype, (100, 64))
    yield TopK(5, 1), of(dtype, (100, 64))
    yield GatherElements(1), [*of(dtype, (100, 64)), *of("int64", (100, 7))]
    yield ScatterElementsAdd(1, (100, 64)), [*of("int64", (100, 7)), *of(dtype, (100, 7))]
    for distribution in ("uniform", "normal", "bernoulli"):
        yield Random(distribution, (1000,), DTYPES[dtype]), of("uint64", (2,))


def kernels(dtype: str) -> Iterator[LaunchKernel]:
    """Kernels of the samples, images with their channels last and in C order."""
    for op, types in samples(dtype):
        yield made(op, types)[0]
        if any(len(type.shape) == 4 for type in types):
            windows = [channels_last(type) if type.rank == 4 else Window.dense(type) for type in types]
            yield made(op, types, windows)[0]
    (image,) = of(dtype, (2, 64, 9, 7))
    turned = kernel_for(Map(("a0",)), [channels_last(image)], [Window.dense(image)], DEVICE)
    assert turned is not None
    yield turned
    (signal,) = of(dtype, (2, 100, 64))
    item = signal.dtype.itemsize
    across = Window(signal, (6400 * item, item, 100 * item))  # rows whose elements lie apart
    wide = signal.dtype.wide.name
    statistics, vectors = of(wide, (2, 100), (2, 100)), of(wide, (64,), (64,))
    for op, types in (
        (LayerNorm(2, 1e-5), [signal, *vectors]),
        (LayerNormGrad(2), [signal, vectors[0], *statistics, signal]),
    ):
        yield made(op, types, [across if type == signal else Window.dense(type) for type in types])[0]


def launches(dtype: str) -> list[Launch]:
    """Their launches, one of each entry and source."""
    found = [each for kernel in kernels(dtype) for each in kernel.instructions if isinstance(each, Launch)]
    found.append(holding(1))
    return list({(each.source, each.entry): each for each in found}.values())
