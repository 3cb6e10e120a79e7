"""Compiled loops give the same bits by one thread and by several."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from foreplan.graph import Op
from foreplan.graph.layouts import channels_last
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.map import Map
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, ChannelMoments
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad
from foreplan.ops.norm.sync import ChannelSums
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.reduce import Reduce
from foreplan.ops.softmax import LogSoftmaxGrad, Softmax
from foreplan.runtime.cpu import threads
from foreplan.runtime.cpu.codegen.native import together
from foreplan.runtime.cpu.kernels import attention, attention_grad, linear_cross_entropy
from tests.cpu.check import needs_onednn, run, type_of

pytestmark = needs_onednn()
IMAGES, ROWS = (4, 70, 40, 40), (3000, 150)
WINDOWS = ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))
POOLED = (4, 70, 20, 20)
OVER_CHANNELS, PLANES = ((5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1)), (4, 1, 70, 1600)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + shape[-1]).uniform(0.5, 2, shape).astype(np.float32)


def whole(high: int, *shape: int, dtype: type = np.int64) -> np.ndarray:
    return np.random.default_rng(high).integers(0, high, shape).astype(dtype)


TANH = "tanh((((a0 - a1) * a2) + a3))"
HEADS = [numbers(2, 70, 3, 8) for _ in range(3)]
CASES: list[tuple[Op, list[np.ndarray]]] = [
    (ChannelMoments(), [numbers(*IMAGES)]),
    (BatchNorm(1e-5), [numbers(*IMAGES), *[numbers(70)] * 4]),
    (BatchNormGrad(1e-5), [numbers(*IMAGES), *[numbers(70)] * 3, numbers(*IMAGES)]),
    (ChannelSums(), [numbers(*IMAGES), numbers(70), numbers(*IMAGES)]),
    (MaxPool(*WINDOWS, True), [numbers(*IMAGES)]),
    (MaxPoolGrad(*WINDOWS, shape=IMAGES), [whole(9, *POOLED, dtype=np.uint8), numbers(*POOLED)]),
    (AvgPool(*WINDOWS), [numbers(*IMAGES)]),
    (AvgPoolGrad(*WINDOWS, shape=IMAGES), [numbers(*POOLED)]),
    (AvgPool(*OVER_CHANNELS), [numbers(*PLANES)]),
    (AvgPoolGrad(*OVER_CHANNELS, shape=PLANES), [numbers(*PLANES)]),
    (LayerNorm(1, 1e-5), [numbers(*ROWS), numbers(150), numbers(150)]),
    (LayerNormGrad(1), [numbers(*ROWS), numbers(150), numbers(3000), numbers(3000), numbers(*ROWS)]),
    (LayerNormGrad(1), [numbers(*ROWS), numbers(150), numbers(3000), numbers(3000), numbers(*ROWS), numbers(*ROWS)]),
    (Softmax(1), [numbers(*ROWS)]),
    (LogSoftmaxGrad(1), [numbers(*ROWS), numbers(*ROWS)]),
    (CrossEntropy(1), [numbers(*ROWS), whole(150, 3000)]),
    (CrossEntropyGrad(1), [numbers(*ROWS), whole(150, 3000), numbers(3000), numbers(3000)]),
    *((Reduce("sum", (axis,)), [numbers(300, 4000)]) for axis in (0, 1)),
    (Map((TANH,)), [numbers(123_457) for _ in range(4)]),
    (Map((TANH,)), [numbers(2, 37, 61, 59), *[numbers(37, 1, 1)] * 3]),
    (LinearCrossEntropy(16), [numbers(40, 12), numbers(700, 12), whole(700, 40)]),
    (LinearCrossEntropy(64), [numbers(90, 700), numbers(600, 700), whole(600, 90)]),
    (Attention(0.3, True, True), HEADS),
    (AttentionGrad(0.3, True, True), [*HEADS, numbers(2, 70, 3, 8), numbers(2, 3, 70), numbers(2, 70, 3, 8)]),
    (Gather(0), [numbers(*ROWS), whole(3000, 2500)]),
    (ScatterAdd(0, (40, 150)), [whole(40, 3000), numbers(*ROWS)]),
]


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    threads.set_threads(1)


@pytest.mark.parametrize(("op", "given"), CASES, ids=lambda x: x.name if isinstance(x, Op) else "")
def test_results_do_not_depend_on_the_number_of_threads(
    op: Op, given: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    for module in (attention, attention_grad, linear_cross_entropy):
        monkeypatch.setattr(module, "GRAIN", 700)
    monkeypatch.setattr(threads, "together", lambda calls: parts.append(len(calls)) or together(calls))
    windows = [channels_last(type_of(x)) for x in given]
    # The products of attention, which are oneDNN's, have other bits from four threads on.
    counts = (1, 2, 3) if op.name.startswith("attention") else (1, 2, 5)
    found = [[y.tobytes() for y in run(op, given, windows, threads=count)] for count in counts]
    assert found[0] == found[1] == found[2]
    assert 2 in parts and max(parts) > 2
