"""Batch normalisation's compiled loops against float64 and the NumPy kernels."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, ChannelMoments
from tests.cpu.check import needs_onednn, run
from tests.engines.engine import Engine, in_both_types
from tests.engines.test_batch_norm import SHAPES, images, vectors
from tests.kernels import as_images

pytestmark = needs_onednn()


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


@in_both_types("cpu")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("over", [None, (0, 0)])
def test_normalisation(engine: Engine, shape: tuple[int, ...], over: tuple[int, int] | None) -> None:
    given = [images(shape, 5, 1.0), *vectors(4, shape[1])]
    engine.check(BatchNorm(1e-3), *given, windows=as_images(*given), over=over)


def test_the_same_bits_in_place_and_not() -> None:
    given = [images((4, 37, 6, 6), 8, 1.0), *vectors(3, 37), images((4, 37, 6, 6), 9)]
    results = [run(BatchNormGrad(1e-5), given, as_images(*given), over) for over in (None, (0, 0), (0, 4))]
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other))
