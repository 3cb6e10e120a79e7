"""Normalisation's compiled loops against float64, and batch normalisation by statistics that are given."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.ops.norm.batch import BatchNorm, ChannelMoments
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad
from tests.cpu.check import needs_onednn, run
from tests.engines.engine import Engine, in_both_types
from tests.engines.test_batch_norm import SHAPES, vectors
from tests.kernels import as_images, expected, normal

pytestmark = needs_onednn()


def test_moments_of_a_mean_that_drifts() -> None:
    x = normal(64, 18, 5, 5) + 1e4 * np.arange(64, dtype=np.float32).reshape(64, 1, 1, 1) ** 2
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
    given = [normal(*shape, seed=5, offset=1.0), *vectors(4, shape[1])]
    engine.check(BatchNorm(1e-3), *given, windows=as_images(*given), over=over)


def test_gradients_of_vectors_summed_over_many_rows_keep_their_digits() -> None:
    (x, g), scale = normal(2, 20_000, 4), normal(4)
    _, mean, r = expected(LayerNorm(1, 1e-5), [x])
    _, dscale, dbias = run(LayerNormGrad(1, True), [x, scale, mean, r, g + 1])
    wide = [a.astype(np.float64) for a in (x, g + 1, mean, r)]
    normalised = (wide[0] - wide[2][:, None]) * wide[3][:, None]
    np.testing.assert_allclose(dbias, wide[1].sum(0), rtol=1e-6)
    np.testing.assert_allclose(dscale, (wide[1] * normalised).sum(0), rtol=1e-6, atol=2e-3)
