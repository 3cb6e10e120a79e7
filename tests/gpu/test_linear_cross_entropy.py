"""Cross-entropy fused with the matrix that makes the logits."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.types import DTYPES
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from tests.gpu.binder import needs_gcc
from tests.gpu.check import check, run, type_of

pytestmark = needs_gcc
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def case(rows: int, depth: int, classes: int, dtype: str = "float32") -> list[np.ndarray]:
    target = RNG.integers(0, classes, rows)
    target[::4] = -100
    return [f32(rows, depth).astype(DTYPES[dtype].numpy), f32(classes, depth).astype(DTYPES[dtype].numpy), target]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("rows", "depth", "classes", "chunk"), [(10, 5, 7, 4), (1, 1, 1, 8), (33, 20, 300, 16)])
def test_chunks(rows: int, depth: int, classes: int, chunk: int, mean: bool, biased: bool) -> None:
    given = [*case(rows, depth, classes), *([f32(classes)] if biased else [])]
    check(LinearCrossEntropy(chunk, mean=mean), *given, rtol=1e-4, atol=1e-5)
    check(LinearCrossEntropy(chunk, mean=mean), *given, over=(1, 0), rtol=1e-4, atol=1e-5)


def test_nothing_counts_and_targets_that_are_no_class() -> None:
    h, w, target = case(6, 4, 5)
    check(LinearCrossEntropy(4), h, w, np.full(6, -100))
    target[1] = 5
    loss, dh, dw = run(LinearCrossEntropy(4), [h, w, target])
    assert np.isnan(loss) and np.isnan(dh[1]).all() and np.isnan(dw).all() and np.isfinite(dh[2:]).all()


@pytest.mark.parametrize("wide", [True, False])
def test_narrow_elements(wide: bool) -> None:
    given = case(20, 16, 40, "bfloat16")
    check(LinearCrossEntropy(8, wide=wide), *given, f32(40), rtol=2e-2, atol=1e-2)


def test_views() -> None:
    h, w, target = case(9, 6, 11)
    target = target.astype(np.int32)
    windows = [Window(type_of(h), (80, 4)), Window(type_of(w), (4, 44)), Window(type_of(target), (8,))]
    check(LinearCrossEntropy(4), h, w, target, windows=windows, atol=1e-5)
