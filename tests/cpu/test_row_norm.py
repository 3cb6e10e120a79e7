"""Layer normalisation's compiled loops against the NumPy kernels and float64."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from tests.cpu.check import check, expected, needs_onednn, run, type_of

pytestmark = needs_onednn()
# Shape and the first normalised axis: a row of one element, odd rows, rows of more than one block, many rows.
CASES = [((1, 1), 1), ((3, 5), 1), ((2, 7, 33), 2), ((4, 3, 2, 17), 2), ((2, 2500), 1), ((200, 48), 1), ((7,), 0)]
OVER = [None, (0, 0)]


def numbers(shape: tuple[int, ...], seed: int, offset: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) + offset).astype(np.float32)


def statistics(op: Op, x: np.ndarray) -> list[np.ndarray]:
    return expected(op, [x])[1:]


def apart(array: np.ndarray, axis: int) -> Window:
    """Rows with gaps between them."""
    strides = list(type_of(array).strides)
    width = array.shape[axis:]
    step = 4 * int(np.prod(width)) + 4 * 11
    for i in reversed(range(axis)):
        strides[i] = step
        step *= array.shape[i]
    return Window(type_of(array), tuple(strides))


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_layer_norm(shape: tuple[int, ...], axis: int, parameters: int, over: tuple[int, int] | None) -> None:
    given = [numbers(shape, 1, 2.0), *(numbers(shape[axis:], 2 + i) for i in range(parameters))]
    check(LayerNorm(axis, 1e-3), *given, over=over)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("parameters", [0, 1])
def test_rms_norm(shape: tuple[int, ...], axis: int, parameters: int, over: tuple[int, int] | None) -> None:
    given = [numbers(shape, 1, 0.5), *(numbers(shape[axis:], 2 + i) for i in range(parameters))]
    check(RMSNorm(axis, 1e-3), *given, over=over)


@pytest.mark.parametrize(
    "place", ["apart", "over x", "over g", "added", "added, over x", "added, over g", "over added"]
)
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_gradients(shape: tuple[int, ...], axis: int, scaled: bool, centred: bool, place: str) -> None:
    x, g = numbers(shape, 3, 1.0), numbers(shape, 4, 0.5)
    of, gradient = (LayerNorm, LayerNormGrad) if centred else (RMSNorm, RMSNormGrad)
    given = [x, *[numbers(shape[axis:], 5)] * scaled, *statistics(of(axis, 1e-3), x), g]
    last = {"over x": 0, "over g": len(given) - 1, "over added": len(given)}.get(place.removeprefix("added, "))
    added = [numbers(shape, 6)] * ("added" in place)
    check(gradient(axis, scaled), *given, *added, over=None if last is None else (0, last), atol=1e-4)


def test_the_same_bits_in_place_and_not() -> None:
    x, g, scale, bias = numbers((65, 77), 6), numbers((65, 77), 7), numbers((77,), 8), numbers((77,), 9)
    normal = [run(LayerNorm(1, 1e-5), [x, scale, bias], over=over) for over in OVER]
    given = [x, scale, *statistics(LayerNorm(1, 1e-5), x), g]
    gradients = [run(LayerNormGrad(1, True), given, over=over) for over in (None, (0, 0), (0, 4))]
    given.append(numbers((65, 77), 10))
    sums = [run(LayerNormGrad(1, True), given, over=over) for over in (None, (0, 0), (0, 4), (0, 5))]
    for results in (normal, gradients, sums):
        assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_rows_with_gaps_are_read_as_they_lie() -> None:
    x, g, scale = numbers((3, 5, 19), 10), numbers((3, 5, 19), 11), numbers((19,), 12)
    check(LayerNorm(2, 1e-3), x, scale, windows=[apart(x, 2), Window.dense(type_of(scale))])
    given = [x, scale, *statistics(LayerNorm(2, 1e-3), x), g]
    windows = [Window.dense(type_of(a)) for a in given]
    check(LayerNormGrad(2, True), *given, windows=[apart(x, 2), *windows[1:4], apart(g, 2)], atol=1e-4)
    check(LayerNormGrad(2, True), *given, x, windows=[*windows, apart(x, 2)], atol=1e-4)


@pytest.mark.parametrize("width", [100, 30_000])
def test_a_mean_far_from_zero_costs_no_digits(width: int) -> None:
    x = numbers((3, width), 13, 300.0)
    _, mean, r = run(LayerNorm(1, 0.0), [x])
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(1), rtol=3e-7)
    np.testing.assert_allclose(r, 1 / exact.std(1), rtol=1e-6)


def test_sums_over_many_rows_keep_their_digits() -> None:
    x, g, scale = numbers((20_000, 4), 14), numbers((20_000, 4), 15, 1.0), numbers((4,), 16)
    mean, r = statistics(LayerNorm(1, 1e-5), x)
    _, dscale, dbias = run(LayerNormGrad(1, True), [x, scale, mean, r, g])
    wide = [a.astype(np.float64) for a in (x, g, mean, r)]
    normal = (wide[0] - wide[2][:, None]) * wide[3][:, None]
    np.testing.assert_allclose(dbias, wide[1].sum(0), rtol=1e-6)
    np.testing.assert_allclose(dscale, (wide[1] * normal).sum(0), rtol=1e-6, atol=2e-3)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x = numbers((4, 40), 17)
    x[1, 3], x[2, 5] = np.nan, np.inf
    y, _, r = run(LayerNorm(1, 1e-5), [x])
    assert np.isnan(y[1:3]).any(axis=1).all() and np.isfinite(y[[0, 3]]).all() and np.isfinite(r[[0, 3]]).all()
