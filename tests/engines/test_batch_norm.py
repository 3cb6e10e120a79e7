"""Statistics of channels, normalisation by them, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.norm.batch import BatchNormGrad, ChannelMoments
from foreplan.ops.norm.sync import ChannelSums
from tests.engines.engine import Engine
from tests.kernels import as_images, dense, differences, layouts, normal
from tests.ops.check import type_of

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 17, 4, 4), (1, 16, 33, 1), (5, 40, 3, 3), (3, 64, 9, 7), (37, 19), (1, 5)]


def vectors(count: int, channels: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [rng.uniform(0.5, 2, channels).astype(np.float32) for _ in range(count)]


def slices(array: np.ndarray) -> Window:
    """Images that are a range of the channels of wider ones."""
    _, channels, height, width = array.shape
    step = 4 * (channels + 13)
    return Window(type_of(array), (height * width * step, 4, width * step, step))


@pytest.mark.bfloat16
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments(engine: Engine, shape: tuple[int, ...]) -> None:
    x = normal(*shape, seed=1, offset=2.0)
    engine.check_lying(ChannelMoments(), x, ways=layouts(x))


@pytest.mark.parametrize("offset", [1e3, 1e4, -1e5])
def test_moments_of_a_mean_far_from_zero(engine: Engine, offset: float) -> None:
    x = normal(4, 20, 9, 9, seed=2, offset=offset)
    mean, variance = engine.run(ChannelMoments(), [x])
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean((0, 2, 3)), rtol=1e-7)
    # Sums are as good as exact on `cpu`; on cards distances from the mean are float32, and lose digits.
    rounding = 1e-5 if engine.name == "cpu" else 2e-8 * abs(offset)
    np.testing.assert_allclose(variance, exact.var((0, 2, 3)), rtol=rounding)


@pytest.mark.parametrize("place", [0, 40])
def test_what_is_not_finite_shows_in_its_channel_alone(engine: Engine, place: int) -> None:
    x = normal(2, 20, 5, 5, seed=4)
    flat = x.transpose(0, 2, 3, 1).reshape(-1, 20)
    flat[place, :3] = [np.nan, np.inf, -np.inf]
    given = np.ascontiguousarray(flat.reshape(2, 5, 5, 20).transpose(0, 3, 1, 2))
    mean, variance = engine.run(ChannelMoments(), [given])
    assert np.isnan(mean[0]) and not np.isfinite(mean[1:3]).any() and np.isnan(variance[:3]).all()
    assert np.isfinite(mean[3:]).all() and np.isfinite(variance[3:]).all()


@pytest.mark.bfloat16
@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 90, 40)], ids=str)
def test_gradient(engine: Engine, shape: tuple[int, ...]) -> None:
    given = [normal(*shape, seed=6, offset=1.0), *vectors(3, shape[1]), normal(*shape, seed=7, offset=0.5)]
    for windows in layouts(*given):
        for over in (None, (0, 0), (0, 4)):
            engine.check(BatchNormGrad(1e-3), *given, windows=windows, over=over, rtol=1e-4, atol=1e-4)


@pytest.mark.bfloat16
@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 90, 40)], ids=str)
def test_sums(engine: Engine, shape: tuple[int, ...]) -> None:
    given = [normal(*shape, seed=6, offset=1.0), *vectors(1, shape[1]), normal(*shape, seed=7, offset=0.5)]
    for windows in layouts(*given):
        engine.check(ChannelSums(), *given, windows=windows, rtol=1e-4, atol=1e-4)


def test_the_same_bits_in_place_and_not(engine: Engine) -> None:
    given = [normal(4, 37, 6, 6, seed=8, offset=1.0), *vectors(3, 37), normal(4, 37, 6, 6, seed=9)]
    results = [engine.run(BatchNormGrad(1e-5), given, as_images(*given), over) for over in (None, (0, 0), (0, 4))]
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.bfloat16
def test_channels_of_wider_images_are_read_as_they_lie(engine: Engine) -> None:
    x, g = normal(3, 24, 4, 5, seed=10), normal(3, 24, 4, 5, seed=11)
    engine.check(ChannelMoments(), x, windows=[slices(x)])
    given = [x, *vectors(3, 24), g]
    last = layouts(*given)[0]
    for windows in ([slices(x), *last[1:4], slices(g)], [last[0], *dense(*given[1:])]):
        engine.check(BatchNormGrad(1e-3), *given, windows=windows, rtol=1e-4, atol=1e-4)
    engine.check(ChannelSums(), *given[:2], g, windows=[slices(x), *last[1:2], slices(g)], rtol=1e-4, atol=1e-4)


def test_the_gradient_is_that_of_the_normalised_images(engine: Engine) -> None:
    """Against differences of a float64 evaluation."""
    x, g = normal(2, 3, 3, 2, seed=12).astype(np.float64), normal(2, 3, 3, 2, seed=13).astype(np.float64)
    scale = np.array([0.5, 1.5, -1.0])

    def weighted(x: np.ndarray) -> float:
        mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        return float((g * (x - mean) / np.sqrt(variance + 1e-3) * scale.reshape(1, 3, 1, 1)).sum())

    given = [x, scale, x.mean((0, 2, 3)), x.var((0, 2, 3)), g]
    dx, _, dbias = engine.run(BatchNormGrad(1e-3), [a.astype(np.float32) for a in given])
    np.testing.assert_allclose(dx, differences(weighted, x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dbias, g.sum((0, 2, 3)), rtol=1e-5)
