"""Compiled loops give the same bits by one thread and by several."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from foreplan.graph import Op
from foreplan.graph.layouts import channels_last
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, ChannelMoments
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.softmax import LogSoftmaxGrad, Softmax
from foreplan.runtime.cpu import threads
from foreplan.runtime.cpu.codegen.native import together
from tests.cpu.check import kernel_for, laid_out, needs_onednn, scratch, type_of

pytestmark = needs_onednn()
IMAGES, ROWS = (4, 70, 40, 40), (3000, 150)
WINDOWS = ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))
POOLED = (4, 70, 20, 20)
OVER_CHANNELS, PLANES = ((5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1)), (4, 1, 70, 1600)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + shape[-1]).uniform(0.5, 2, shape).astype(np.float32)


def whole(high: int, *shape: int, dtype: type = np.int64) -> np.ndarray:
    return np.random.default_rng(high).integers(0, high, shape).astype(dtype)


CASES: list[tuple[Op, list[np.ndarray]]] = [
    (ChannelMoments(), [numbers(*IMAGES)]),
    (BatchNorm(1e-5), [numbers(*IMAGES), *[numbers(70)] * 4]),
    (BatchNormGrad(1e-5), [numbers(*IMAGES), *[numbers(70)] * 3, numbers(*IMAGES)]),
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
    monkeypatch.setattr(threads, "together", lambda calls: parts.append(len(calls)) or together(calls))
    types = [type_of(x) for x in given]
    results = op.infer(types)
    windows, layouts = ([channels_last(type) for type in found] for found in (types, results))
    arrays = [laid_out(x, window) for x, window in zip(given, windows)]
    found: list[list[bytes]] = []
    for count in (1, 2, 5):
        kernel = kernel_for(op, windows, layouts, count)
        assert kernel is not None
        outputs = [laid_out(np.zeros(type.shape, type.dtype.numpy), w) for type, w in zip(results, layouts)]
        threads.set_threads(count)
        kernel.bind(arrays, outputs, scratch(kernel.workspace))()
        found.append([y.tobytes() for y in outputs])
    assert found[0] == found[1] == found[2]
    assert 2 in parts and max(parts) > 2
