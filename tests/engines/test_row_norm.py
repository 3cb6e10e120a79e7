"""Normalisation of rows and its gradients."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from tests.engines.engine import Engine
from tests.kernels import dense, expected, normal
from tests.ops.check import type_of

# Shape and the first normalised axis: rows of one element, odd ones, many, of whole vectors, of several blocks.
CASES = [((1, 1), 1), ((3, 5), 1), ((2, 7, 33), 2), ((4, 3, 2, 17), 2), ((2, 2500), 1), ((200, 48), 1), ((7,), 0)]
CASES += [((2, 3, 5, 4), 2), ((70, 33), 1), ((37, 384), 1), ((3, 4096), 1), ((2, 4100), 1), ((2, 5, 3, 8), 2)]


def of_gradient(gradient: type[Op], shape: tuple[int, ...], axis: int, scaled: bool) -> list[np.ndarray]:
    """What a gradient reads: x, the scale, what was kept of each row, and the gradient of the result."""
    x, scale = normal(*shape, seed=3, offset=1.0), [normal(*shape[axis:], seed=5)] * scaled
    _, *kept = expected((LayerNorm if gradient is LayerNormGrad else RMSNorm)(axis, 1e-3), [x])
    return [x, *scale, *kept, normal(*shape, seed=4, offset=0.5)]


@pytest.mark.bfloat16
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("op", [LayerNorm, RMSNorm])
def test_rows(engine: Engine, op: type[Op], shape: tuple[int, ...], axis: int) -> None:
    x, count = normal(*shape, seed=1, offset=2.0), 2 if op is LayerNorm else 1
    vectors = [normal(*shape[axis:], seed=2 + i) for i in range(count)]
    for given in range(count + 1):
        engine.check_over(op(axis, 1e-3), [x, *vectors[:given]], None, (0, 0))


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
    engine.check_over(
        op(axis, scaled), [*given, normal(*shape, seed=6)], None, (0, 0), (0, last), (0, last + 1), **near
    )


@pytest.mark.bfloat16
def test_the_same_bits_in_place_and_not(engine: Engine) -> None:
    x, scale, bias = normal(65, 77, seed=6), normal(77, seed=8), normal(77, seed=9)
    rows = [engine.run(LayerNorm(1, 1e-5), [x, scale, bias], over=over) for over in (None, (0, 0))]
    given = of_gradient(LayerNormGrad, (65, 77), 1, True)
    gradients = [engine.run(LayerNormGrad(1, True), given, over=over) for over in (None, (0, 0), (0, 4))]
    given.append(normal(65, 77, seed=10))
    sums = [engine.run(LayerNormGrad(1, True), given, over=over) for over in (None, (0, 0), (0, 4), (0, 5))]
    for results in (rows, gradients, sums):
        assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.bfloat16
@pytest.mark.parametrize("shape", [(3, 5, 19), (4, 6, 10), (4, 3, 200)], ids=str)
def test_rows_are_read_as_they_lie(engine: Engine, shape: tuple[int, ...]) -> None:
    """With gaps, which leave the beginnings of rows aligned or not, and in another order."""
    given, (rows, columns) = of_gradient(LayerNormGrad, shape, 2, True), shape[1:]
    x, scale, vectors = given[0], given[1], dense(*given[1:-1])
    whole, turned = type_of(x), Window(type_of(x), (4 * columns, 4 * columns * shape[0], 4))
    even, odd = (Window(whole, (rows * step, step, 4)) for step in (4 * columns + 32, 4 * columns + 20))
    for window in (even, odd, turned):
        engine.check(LayerNorm(2, 1e-3), x, scale, windows=[window, *vectors[:1]])
    repeated = np.full_like(scale, 1.5)
    engine.check(LayerNorm(2, 1e-3), x, repeated, windows=[turned, Window(type_of(scale), (0,))])
    op, near = LayerNormGrad(2, True), {"rtol": 1e-4, "atol": 1e-4}
    for first, last in ((even, even), (odd, turned), (turned, odd)):
        engine.check(op, *given, windows=[first, *vectors, last], **near)
    for first, last, added in ((even, turned, even), (turned, odd, even), (even, even, odd), (turned, even, even)):
        engine.check(op, *given, x, windows=[first, *vectors, last, added], **near)


@pytest.mark.parametrize("width", [100, 30_000])
def test_a_mean_far_from_zero_costs_no_digits(engine: Engine, width: int) -> None:
    x = normal(3, width, seed=13, offset=300.0)
    _, mean, r = engine.run(LayerNorm(1, 0.0), [x])
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(1), rtol=3e-7)
    np.testing.assert_allclose(r, 1 / exact.std(1), rtol=1e-6)


@pytest.mark.bfloat16
def test_what_is_not_finite_stays_in_its_row(engine: Engine) -> None:
    x = normal(4, 40, seed=17)
    x[1, 3], x[2, 5] = np.nan, np.inf
    y, _, r = engine.run(LayerNorm(1, 1e-5), [x])
    assert np.isnan(y[1:3]).any(axis=1).all() and np.isfinite(y[[0, 3]]).all() and np.isfinite(r[[0, 3]]).all()
