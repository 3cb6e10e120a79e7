"""Batch normalisation's compiled loops against float64 and the NumPy kernels."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, ChannelMoments
from tests.cpu.check import check, needs_onednn, run, type_of
from tests.kernels import as_images

pytestmark = needs_onednn()
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 17, 4, 4), (1, 16, 33, 1), (5, 40, 3, 3), (37, 19), (1, 5)]


def images(shape: tuple[int, ...], seed: int, offset: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) + offset).astype(np.float32)


def vectors(count: int, channels: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [rng.uniform(0.5, 2, channels).astype(np.float32) for _ in range(count)]


def slices(array: np.ndarray) -> Window:
    """Images that are a range of the channels of wider ones."""
    _, channels, height, width = array.shape
    step = 4 * (channels + 13)
    return Window(type_of(array), (height * width * step, 4, width * step, step))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["c", "last"])
def test_moments(shape: tuple[int, ...], last: bool) -> None:
    x = images(shape, 1, 2.0)
    check(ChannelMoments(), x, windows=as_images(x) if last else None)


@pytest.mark.parametrize("offset", [1e3, 1e4, -1e5])
def test_moments_of_a_mean_far_from_zero(offset: float) -> None:
    x = images((4, 20, 9, 9), 2, offset)
    mean, variance = run(ChannelMoments(), [x])
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean((0, 2, 3)), rtol=1e-7)
    np.testing.assert_allclose(variance, exact.var((0, 2, 3)), rtol=1e-5)


def test_moments_of_a_mean_that_drifts() -> None:
    x = images((64, 18, 5, 5), 3) + 1e4 * np.arange(64, dtype=np.float32).reshape(64, 1, 1, 1) ** 2
    mean, variance = run(ChannelMoments(), [x])
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(variance, exact.var((0, 2, 3)), rtol=1e-6)


def test_constant_channels_have_no_variance_but_what_float64_loses() -> None:
    x = np.broadcast_to(np.linspace(-1e6, 1e6, 21, dtype=np.float32).reshape(1, 21, 1, 1), (3, 21, 5, 5)).copy()
    mean, variance = run(ChannelMoments(), [x])
    np.testing.assert_array_equal(mean, x[0, :, 0, 0])
    assert (np.sqrt(variance) <= 1e-15 * np.abs(mean)).all()


@pytest.mark.parametrize("place", [0, 40])
def test_what_is_not_finite_shows_in_its_channel_alone(place: int) -> None:
    x = images((2, 20, 5, 5), 4)
    flat = x.transpose(0, 2, 3, 1).reshape(-1, 20)
    flat[place, :3] = [np.nan, np.inf, -np.inf]
    mean, variance = run(ChannelMoments(), [np.ascontiguousarray(flat.reshape(2, 5, 5, 20).transpose(0, 3, 1, 2))])
    assert np.isnan(mean[0]) and mean[1] == np.inf and mean[2] == -np.inf and np.isnan(variance[:3]).all()
    assert np.isfinite(mean[3:]).all() and np.isfinite(variance[3:]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("over", [None, (0, 0)])
def test_normalisation(shape: tuple[int, ...], over: tuple[int, int] | None) -> None:
    given = [images(shape, 5, 1.0), *vectors(4, shape[1])]
    check(BatchNorm(1e-3), *given, windows=as_images(*given), over=over)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("over", [None, (0, 0), (0, 4)])
def test_gradient(shape: tuple[int, ...], over: tuple[int, int] | None) -> None:
    given = [images(shape, 6, 1.0), *vectors(3, shape[1]), images(shape, 7, 0.5)]
    check(BatchNormGrad(1e-3), *given, windows=as_images(*given), over=over, atol=1e-4)


def test_the_same_bits_in_place_and_not() -> None:
    given = [images((4, 37, 6, 6), 8, 1.0), *vectors(3, 37), images((4, 37, 6, 6), 9)]
    results = [run(BatchNormGrad(1e-5), given, as_images(*given), over) for over in (None, (0, 0), (0, 4))]
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other))


def test_channels_of_wider_images_are_read_as_they_lie() -> None:
    x, g = images((3, 24, 4, 5), 10), images((3, 24, 4, 5), 11)
    check(ChannelMoments(), x, windows=[slices(x)])
    given = [x, *vectors(3, 24), g]
    check(BatchNormGrad(1e-3), *given, windows=[slices(x), *as_images(*given[1:4]), slices(g)], atol=1e-4)


def test_the_gradient_is_that_of_the_normalised_images() -> None:
    """Against differences of a float64 evaluation."""
    x, g = images((2, 3, 3, 2), 12).astype(np.float64), images((2, 3, 3, 2), 13).astype(np.float64)
    scale = np.array([0.5, 1.5, -1.0])

    def weighted(x: np.ndarray) -> float:
        mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        return float((g * (x - mean) / np.sqrt(variance + 1e-3) * scale.reshape(1, 3, 1, 1)).sum())

    wanted = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = 1e-6
        wanted[at] = (weighted(x + step) - weighted(x - step)) / 2e-6
    given = [x, scale, x.mean((0, 2, 3)), x.var((0, 2, 3)), g]
    dx, _, dbias = run(BatchNormGrad(1e-3), [a.astype(np.float32) for a in given])
    np.testing.assert_allclose(dx, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dbias, g.sum((0, 2, 3)), rtol=1e-5)
