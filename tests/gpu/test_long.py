"""Places of 64 bits, as long tensors have them, give the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from foreplan.graph import Op, TensorType
from foreplan.graph.types import DTYPES
from foreplan.ops.bits import PackBits
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.join import Pad
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.norm.batch import ChannelMoments
from foreplan.ops.norm.rows import LayerNorm
from foreplan.ops.pool import MaxPool
from foreplan.ops.reduce import Reduce
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.ops.scan import CumSum
from foreplan.ops.softmax import Softmax
from foreplan.runtime.cuda import table
from foreplan.runtime.cuda.kernels import conv, index, join, lines, map, norm, pool, product, reduce, resize, rows
from foreplan.runtime.cuda.launch import Launch
from tests.gpu.check import check, made, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = needs_gcc
PLAIN = ((1, 1), ((1, 1), (1, 1)), (1, 1))
WHOLE = np.array([3, 0, 4, 4, 1, 2, 0, 3, 1])
CASES: list[tuple[Op, list[np.ndarray]]] = [
    (Map(("(a0 + (a1 * a2))",)), [normal(2, 3, 5), normal(3, 1), normal(5)]),
    (PackBits("(a0 > 0)"), [normal(16, 5)]),
    (Reduce("sum", (0, 2)), [normal(4, 5, 6)]),
    (MatMul(), [normal(2, 5, 6), normal(2, 6, 7)]),
    (Conv(*PLAIN), [normal(2, 3, 5, 4), normal(4, 3, 3, 3)]),
    (ConvDataGrad(*PLAIN, spatial=(5, 4)), [normal(2, 4, 5, 4), normal(4, 3, 3, 3)]),
    (ConvWeightGrad(*PLAIN, kernel=(3, 3)), [normal(2, 3, 5, 4), normal(2, 4, 5, 4)]),
    (ChannelMoments(), [normal(2, 6, 3, 5)]),
    (MaxPool((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1), save_index=True), [normal(2, 3, 5, 5)]),
    (Resize((2, 3, 7, 4)), [normal(2, 3, 5, 6)]),
    (ResizeGrad((2, 3, 7, 4), extents=(2, 3, 5, 6)), [normal(2, 3, 7, 4)]),
    (Softmax(1), [normal(6, 11)]),
    (LayerNorm(1, 1e-5), [normal(6, 11), normal(11)]),
    (Pad(((1, 0), (2, 3))), [normal(3, 4)]),
    (Gather(0), [normal(5, 7), WHOLE]),
    (ScatterAdd(0, (5, 7)), [WHOLE, normal(9, 7)]),
    (CumSum(1), [normal(4, 5)]),
]


@pytest.fixture
def long_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (conv, index, join, lines, map, norm, pool, product, reduce, resize, rows):
        if hasattr(module, "index_type"):
            monkeypatch.setattr(module, "index_type", lambda count: "u64")
    table._make.cache_clear()
    yield
    table._make.cache_clear()


@pytest.mark.parametrize(("op", "given"), CASES, ids=[op.name for op, _ in CASES])
def test_places_of_64_bits(op: Op, given: list[np.ndarray], long_places: None) -> None:
    kernel, _, _ = made(op, [type_of(x) for x in given])
    found = [each for each in kernel.instructions if isinstance(each, Launch)]
    assert all(dict(each.source.defines)["INDEX"] == "u64" for each in found)
    check(op, *given, atol=1e-4)


def test_when_they_are_taken() -> None:
    few, many = (TensorType(DTYPES["float32"], (count, 3)) for count in (1000, 1 << 34))
    for type, wanted in ((few, "u32"), (many, "u64")):
        for op in (Map(("(a0 * 2)",)), Reduce("sum", (0,)), Softmax(1), Pad(((0, 0), (1, 1))), CumSum(1)):
            kernel, _, _ = made(op, [type])
            (first, *_) = kernel.instructions
            assert isinstance(first, Launch) and dict(first.source.defines)["INDEX"] == wanted, op
