"""Normalisation of rows and its gradients."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.types import DTYPES
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm
from tests.gpu.check import check, made, run, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)
SHAPES = [((5, 7), 1), ((3, 1), 1), ((2, 3, 300), 2), ((2, 3, 5, 4), 2), ((9,), 0), ((70, 33), 1)]
# Rows of whole vectors: in the registers of a warp and of a block; too long for these; in those of two threads.
WHOLE = [((37, 384), 1), ((3, 4096), 1), ((2, 4100), 1), ((2, 5, 3, 8), 2)]


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def gradient_case(op: type[Op], shape: tuple[int, ...], axis: int, scaled: bool) -> list[np.ndarray]:
    x, scale = f32(*shape), [f32(*shape[axis:])] if scaled else []
    _, *statistics = run((LayerNorm if op is LayerNormGrad else RMSNorm)(axis, 1e-5), [x])
    return [x, *scale, *statistics, f32(*shape)]


def test_sums_over_many_rows_are_taken_in_parts() -> None:
    given = gradient_case(LayerNormGrad, (3, 400, 40), 2, True)
    kernel, _, _ = made(LayerNormGrad(2), [type_of(x) for x in given])
    assert kernel.workspace >= 9 * 2 * 40 * 4
    check(LayerNormGrad(2), *given, rtol=1e-4, atol=1e-3)


def test_views() -> None:
    given = gradient_case(LayerNormGrad, (4, 6, 10), 2, True)
    spread = Window(type_of(given[0]), (6 * 56, 56, 4))
    turned = Window(type_of(given[0]), (40, 160, 4))
    dense = [Window.dense(type_of(x)) for x in given[1:-1]]
    check(LayerNormGrad(2), *given, windows=[spread, *dense, turned], rtol=1e-4, atol=1e-5)
    check(LayerNormGrad(2), *given, given[0], windows=[turned, *dense, spread, spread], rtol=1e-4, atol=1e-5)
    repeated = [Window(type_of(given[1]), (0,))]
    x, ones = given[0], np.full_like(given[1], 1.5)
    check(LayerNorm(2, 1e-5), x, ones, windows=[turned, *repeated], atol=1e-5)


def test_rows_with_gaps_and_in_another_order() -> None:
    given = gradient_case(LayerNormGrad, (4, 3, 200), 2, True)
    dense = [Window.dense(type_of(x)) for x in given[1:-1]]
    apart, odd = (Window(type_of(given[0]), (3 * step, step, 4)) for step in (832, 820))
    turned = Window(type_of(given[0]), (800, 3200, 4))
    for windows in ([apart, *dense, turned, apart], [turned, *dense, odd, apart], [apart, *dense, apart, odd]):
        check(LayerNormGrad(2), *given, given[0], windows=windows, rtol=1e-4, atol=1e-5)
    check(LayerNorm(2, 1e-5), *given[:2], windows=[odd, dense[0]], atol=1e-5)
    check(LayerNorm(2, 1e-5), *given[:2], windows=[apart, dense[0]], atol=1e-5)


@pytest.mark.parametrize("begins", ["x", "scale", "g", "added"])
def test_what_begins_between_vectors_gives_the_same_numbers(begins: str) -> None:
    given = [*gradient_case(LayerNormGrad, (5, 96), 1, True), f32(5, 96)]
    at = {"x": 0, "scale": 1, "g": 4, "added": 5}[begins]
    found = run(LayerNormGrad(1), given, behind=[int(i == at) for i in range(len(given))])
    whole = run(LayerNormGrad(1), given)
    for one, other in zip(whole, found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [50, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types(dtype: str, width: int) -> None:
    x, g = (f32(6, width).astype(DTYPES[dtype].numpy) for _ in range(2))
    scale = f32(width).astype(np.float64 if dtype == "float64" else np.float32)
    narrow = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-10}[dtype]
    check(LayerNorm(1, 1e-5), x, scale, scale, rtol=narrow, atol=narrow)
    _, *statistics = run(LayerNorm(1, 1e-5), [x])
    check(LayerNormGrad(1), x, scale, *statistics, g, rtol=narrow, atol=3 * narrow)
    check(LayerNormGrad(1), x, scale, *statistics, g, x, over=(0, 5), rtol=narrow, atol=3 * narrow)
    check(LayerNormGrad(1), x, scale, *statistics, g, x, over=(0, 4), rtol=narrow, atol=3 * narrow)
