"""Kernels allocate nothing: all they need is in the workspace, which is as small as they say."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op
from foreplan.graph.types import tensor_type
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.index_elements import GatherElements, ScatterElementsAdd
from foreplan.ops.join import Concat, Pad, Unslice
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, ChannelMoments
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from foreplan.ops.norm.sync import ChannelSums
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.random import Random
from foreplan.ops.reduce import Reduce
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.ops.scan import CumSum
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from foreplan.ops.sort import ArgReduce, TopK
from tests.ops.check import allocated_bytes

KIB = 1 << 10
Cases = list[tuple[Op, str]]
IMAGES, ROWS, MANY, QUERIES = "8,32,56,56", "4,300,500", "1024,3136", "2,300,4,16"
WINDOWS, HALF = ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)), (2, 8, 128, 128)


def convolutions(x: str, w: str, y: str, groups: int) -> Cases:
    """With a bias, and added to something."""
    (*_, taps), spatial = (tuple(map(int, shape.split(","))) for shape in (w, x))
    geometry = ((1, 1), ((taps // 2, taps // 2),) * 2, (1, 1), groups)
    forward = Conv(*geometry)
    data, weight = ConvDataGrad(*geometry, spatial=spatial[2:]), ConvWeightGrad(*geometry, kernel=(taps, taps))
    return [
        *((forward, f"{x} {w}{more}") for more in ("", f" {w.split(',')[0]}")),
        *((data, f"{y} {w}{more}") for more in ("", f" {x}")),
        *((weight, f"{x} {y}{more}") for more in ("", f" {w}")),
    ]


def indexed(dtype: str) -> Cases:
    at = f"{dtype}[80000]"
    return [
        (Gather(0), f"5000,3 {at}"),
        (ScatterAdd(0, (5000, 3)), f"{at} 80000,3"),
        (ScatterAdd(0, (500, 300)), f"{dtype}[4000] 4000,300"),
        (GatherElements(0), f"500,300 {dtype}[500,300]"),
        (ScatterElementsAdd(0, (500, 300)), f"{dtype}[500,300] 500,300"),
    ]


ANY, HOW = float("inf"), ("sum", "mean", "prod", "max", "min")
TEXTS = ("((a0 * a1) + exp(a0))", "where((a0 < a1), a0, (a1 * 2.0))", "relu(a0)", "clip(a0, 0.0, 0.5)")
AXES = ((0,), (0, 2, 3), (1,), (2, 3), (0, 1, 2, 3), (3,), (1, 3))
# Bytes that may be allocated, those of the workspace, ops, and what each is given: types with float32 left out. NumPy
# iterates with buffers of its own, of 8,192 elements an operand at most.
LIMITS: list[tuple[float, float, Cases]] = [
    (8 * KIB, ANY, [(CumSum(1, True, True), "100,1000"), (CumSum(0), "100,1000")]),
    (8 * KIB, ANY, [(Concat(1), "100,1000 100,1000"), (Unslice((100, 3000), (0, 5), (1, 2)), "100,1000")]),
    (8 * KIB, ANY, [(Pad(((3, 3), (5, 5)), 0.0, m), "100,1000") for m in ("constant", "edge", "reflect", "wrap")]),
    (16 * KIB, ANY, [(MatMul(), f"512,300 300,400{more}") for more in ("", " 512,400")]),
    (16 * KIB, ANY, [(MatMul(True), f"300,512 300,400{more}") for more in ("", " 512,400")]),
    (16 * KIB, ANY, [(Reduce(how, axes), "8,64,56,56") for how in HOW for axes in AXES]),
    (64 * KIB, ANY, [(Map((text,)), "64,4096 4096") for text in TEXTS]),
    (64 * KIB, ANY, [(Map((f"{name}((a0 - 50.0))",)), "64,4096") for name in ("sigmoid", "erf")]),
    (600 * KIB, ANY, [(Map(("truncdiv(a0, a1)",)), "int32[64,4096] int32[64,4096]")]),
    (80_000, ANY, [*indexed("int64"), *indexed("int32"), (PackBits("(a0 > 0)"), "40,64,1000")]),
    (80_000, ANY, [(op, "40,3000") for op in (TopK(5, 1), TopK(40, 0), TopK(5, 1, False), ArgReduce("max", 1))]),
    (80_000, ANY, [(ArgReduce("min", 0, last=True), "40,3000"), (TopK(5, 1), "int64[40,3000]")]),
    (80_000, ANY, [(CrossEntropy(1), "60,3000 int64[60]"), (CrossEntropyGrad(1), "60,3000 int64[60] 60 60")]),
    (80_000, ANY, [(LinearCrossEntropy(16), "60,50 3000,50 int32[60]")]),
    (200_000, ANY, [(CrossEntropy(0), "60,3000 int32[3000]")]),
    (80_000, 5 << 20, [(Attention(0.1), "1,1,64,8 1,1,30000,8 1,1,30000,8")]),
    (80_000, ANY, [(Attention(0.1, True, True), " ".join([QUERIES] * 3))]),
    (80_000, ANY, [(AttentionGrad(0.1, True, True), " ".join([*[QUERIES] * 4, "2,4,300", QUERIES]))]),
    (100_000, ANY, [(PackedAttentionGrad(0.3, 2, 2, True), "1,600,192 1,600,2,32 1,2,600 1,600,2,32")]),
    (120_000, ANY, [(MaskedMap(("where(a0, a1, 0.0)",)), "uint8[320000] 40,64,1000")]),
    (120_000, 512 * KIB, [(op(axis), ROWS) for op in (Softmax, LogSoftmax) for axis in range(3)]),
    (120_000, 512 * KIB, [(op(axis), f"{ROWS} {ROWS}") for op in (SoftmaxGrad, LogSoftmaxGrad) for axis in range(3)]),
    (150_000, ANY, [(Random(how, (200_000,)), "uint64[2]") for how in ("uniform", "normal", "bernoulli")]),
    (128 * KIB, ANY, convolutions("4,16,40,40", "16,16,3,3", "4,16,40,40", 1)),
    (128 * KIB, ANY, convolutions("1,8,96,96", "8,1,3,3", "1,8,96,96", 8)),
    (128 * KIB, ANY, convolutions("2,32,32,32", "32,32,1,1", "2,32,32,32", 1)),
    (128 * KIB, ANY, [(op, "2,32,96,96") for op in (MaxPool(*WINDOWS), MaxPool(*WINDOWS, True), AvgPool(*WINDOWS))]),
    (128 * KIB, ANY, [(MaxPoolGrad(*WINDOWS, shape=(2, 32, 96, 96)), "uint8[2,32,48,48] 2,32,48,48")]),
    (128 * KIB, ANY, [(AvgPoolGrad(*WINDOWS, shape=(2, 32, 96, 96)), "2,32,48,48")]),
    (128 * KIB, ANY, [(Resize((2, 8, 256, 256), mode), "2,8,128,128") for mode in ("nearest", "linear")]),
    (
        128 * KIB,
        ANY,
        [(ResizeGrad(HALF, how, extents=(2, 8, 64, 64)), "2,8,128,128") for how in ("nearest", "linear")],
    ),
    (128 * KIB, 1 << 20, [(ChannelMoments(), IMAGES), (BatchNorm(1e-3), f"{IMAGES} 32 32 32 32")]),
    (
        128 * KIB,
        1 << 20,
        [(BatchNormGrad(1e-3), f"{IMAGES} 32 32 32 {IMAGES}"), (ChannelSums(), f"{IMAGES} 32 {IMAGES}")],
    ),
    (128 * KIB, 1 << 20, [(LayerNorm(1, 1e-3), f"{MANY} 3136 3136"), (RMSNorm(1, 1e-3), f"{MANY} 3136")]),
    (128 * KIB, 1 << 20, [(LayerNormGrad(1), f"{MANY} 3136 1024 1024 {MANY}{more}") for more in ("", f" {MANY}")]),
    (128 * KIB, 1 << 20, [(RMSNormGrad(1), f"{MANY} 3136 1024 {MANY}")]),
]


@pytest.mark.parametrize(
    ("op", "types", "allocated", "workspace"),
    [(*case, *limits) for *limits, cases in LIMITS for case in cases],
    ids=lambda x: x.name if isinstance(x, Op) else "",
)
def test_memory_is_only_the_workspace(op: Op, types: str, allocated: float, workspace: float) -> None:
    kinds = [tensor_type(text if "[" in text else f"float32[{text}]") for text in types.split()]
    rng, given = np.random.default_rng(0), []
    for type in kinds:
        drawn = np.abs(rng.standard_normal(type.shape)) if type.dtype.is_float else rng.integers(1, 9, type.shape)
        given.append(drawn.astype(type.dtype.numpy))
    with np.errstate(all="ignore"):
        assert allocated_bytes(op, *given) < allocated
    assert op.workspace(kinds, op.infer(kinds)) <= workspace
