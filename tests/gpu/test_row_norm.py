"""Normalisation of rows and its gradients."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.types import DTYPES
from foreplan.ops.row_norm import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from tests.gpu.binder import needs_gcc
from tests.gpu.check import check, made, run, type_of

pytestmark = needs_gcc
RNG = np.random.default_rng(0)
SHAPES = [((5, 7), 1), ((3, 1), 1), ((2, 3, 300), 2), ((2, 3, 5, 4), 2), ((9,), 0), ((70, 33), 1)]


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("op", [LayerNorm, RMSNorm])
def test_rows(op: type[Op], shape: tuple[int, ...], axis: int) -> None:
    x, vectors = 2 * f32(*shape) + 1, [f32(*shape[axis:]) for _ in range(2 if op is LayerNorm else 1)]
    for count in range(len(vectors) + 1):
        check(op(axis, 1e-5), x, *vectors[:count], atol=1e-5)
    check(op(axis, 1e-5), x, *vectors, over=(0, 0), atol=1e-5)


def gradient_case(op: type[Op], shape: tuple[int, ...], axis: int, scaled: bool) -> list[np.ndarray]:
    x, scale = f32(*shape), [f32(*shape[axis:])] if scaled else []
    _, *statistics = run((LayerNorm if op is LayerNormGrad else RMSNorm)(axis, 1e-5), [x])
    return [x, *scale, *statistics, f32(*shape)]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("op", [LayerNormGrad, RMSNormGrad])
def test_gradients(op: type[Op], scaled: bool, shape: tuple[int, ...], axis: int) -> None:
    given = gradient_case(op, shape, axis, scaled)
    check(op(axis, scaled), *given, rtol=1e-4, atol=2e-5)
    for over in ((0, 0), (0, len(given) - 1)):
        check(op(axis, scaled), *given, over=over, rtol=1e-4, atol=2e-5)


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
    repeated = [Window(type_of(given[1]), (0,))]
    x, ones = given[0], np.full_like(given[1], 1.5)
    check(LayerNorm(2, 1e-5), x, ones, windows=[turned, *repeated], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types(dtype: str) -> None:
    x, g = (f32(6, 50).astype(DTYPES[dtype].numpy) for _ in range(2))
    scale = f32(50).astype(np.float64 if dtype == "float64" else np.float32)
    narrow = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-10}[dtype]
    check(LayerNorm(1, 1e-5), x, scale, scale, rtol=narrow, atol=narrow)
    _, *statistics = run(LayerNorm(1, 1e-5), [x])
    check(LayerNormGrad(1), x, scale, *statistics, g, rtol=narrow, atol=3 * narrow)
