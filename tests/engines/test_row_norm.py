"""Normalisation of rows and its gradients."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from tests.engines.engine import Engine
from tests.kernels import expected
from tests.ops.check import type_of

# Shape and the first normalised axis: rows of one element, odd ones, many, of whole vectors, of several blocks.
CASES = [((1, 1), 1), ((3, 5), 1), ((2, 7, 33), 2), ((4, 3, 2, 17), 2), ((2, 2500), 1), ((200, 48), 1), ((7,), 0)]
CASES += [((2, 3, 5, 4), 2), ((70, 33), 1), ((37, 384), 1), ((3, 4096), 1), ((2, 4100), 1), ((2, 5, 3, 8), 2)]


def numbers(shape: tuple[int, ...], seed: int, offset: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) + offset).astype(np.float32)


def of_gradient(gradient: type[Op], shape: tuple[int, ...], axis: int, scaled: bool) -> list[np.ndarray]:
    """What a gradient reads: x, the scale, what was kept of each row, and the gradient of the result."""
    x, scale = numbers(shape, 3, 1.0), [numbers(shape[axis:], 5)] * scaled
    _, *kept = expected((LayerNorm if gradient is LayerNormGrad else RMSNorm)(axis, 1e-3), [x])
    return [x, *scale, *kept, numbers(shape, 4, 0.5)]


def apart(array: np.ndarray, axis: int) -> Window:
    """Rows with gaps between them."""
    strides = list(type_of(array).strides)
    step = 4 * int(np.prod(array.shape[axis:])) + 4 * 11
    for i in reversed(range(axis)):
        strides[i] = step
        step *= array.shape[i]
    return Window(type_of(array), tuple(strides))


@pytest.mark.bfloat16
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("op", [LayerNorm, RMSNorm])
def test_rows(engine: Engine, op: type[Op], shape: tuple[int, ...], axis: int) -> None:
    x, vectors = numbers(shape, 1, 2.0), [numbers(shape[axis:], 2 + i) for i in range(2 if op is LayerNorm else 1)]
    for count in range(len(vectors) + 1):
        engine.check_over(op(axis, 1e-3), [x, *vectors[:count]], None, (0, 0))


@pytest.mark.bfloat16
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("op", [LayerNormGrad, RMSNormGrad])
def test_gradients(engine: Engine, op: type[Op], scaled: bool, shape: tuple[int, ...], axis: int) -> None:
    given = of_gradient(op, shape, axis, scaled)
    # What products and their mean differ by is multiplied by the reciprocal deviation: 32 where a row has one number.
    near = {"rtol": 1e-4, "atol": 1e-4}
    last = len(given) - 1
    engine.check_over(op(axis, scaled), given, None, (0, 0), (0, last), **near)
    engine.check_over(op(axis, scaled), [*given, numbers(shape, 6)], None, (0, 0), (0, last), (0, last + 1), **near)


@pytest.mark.bfloat16
def test_the_same_bits_in_place_and_not(engine: Engine) -> None:
    x, scale, bias = numbers((65, 77), 6), numbers((77,), 8), numbers((77,), 9)
    normal = [engine.run(LayerNorm(1, 1e-5), [x, scale, bias], over=over) for over in (None, (0, 0))]
    given = of_gradient(LayerNormGrad, (65, 77), 1, True)
    gradients = [engine.run(LayerNormGrad(1, True), given, over=over) for over in (None, (0, 0), (0, 4))]
    given.append(numbers((65, 77), 10))
    sums = [engine.run(LayerNormGrad(1, True), given, over=over) for over in (None, (0, 0), (0, 4), (0, 5))]
    for results in (normal, gradients, sums):
        assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.bfloat16
def test_rows_with_gaps_are_read_as_they_lie(engine: Engine) -> None:
    given = of_gradient(LayerNormGrad, (3, 5, 19), 2, True)
    x, g, windows = given[0], given[-1], [Window.dense(type_of(a)) for a in given]
    engine.check(LayerNorm(2, 1e-3), x, given[1], windows=[apart(x, 2), windows[1]])
    op, near = LayerNormGrad(2, True), {"rtol": 1e-4, "atol": 1e-4}
    engine.check(op, *given, windows=[apart(x, 2), *windows[1:4], apart(g, 2)], **near)
    engine.check(op, *given, x, windows=[*windows, apart(x, 2)], **near)


@pytest.mark.parametrize("width", [100, 30_000])
def test_a_mean_far_from_zero_costs_no_digits(engine: Engine, width: int) -> None:
    x = numbers((3, width), 13, 300.0)
    _, mean, r = engine.run(LayerNorm(1, 0.0), [x])
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(1), rtol=3e-7)
    np.testing.assert_allclose(r, 1 / exact.std(1), rtol=1e-6)


@pytest.mark.bfloat16
def test_what_is_not_finite_stays_in_its_row(engine: Engine) -> None:
    x = numbers((4, 40), 17)
    x[1, 3], x[2, 5] = np.nan, np.inf
    y, _, r = engine.run(LayerNorm(1, 1e-5), [x])
    assert np.isnan(y[1:3]).any(axis=1).all() and np.isfinite(y[[0, 3]]).all() and np.isfinite(r[[0, 3]]).all()
