"""Gradients of a layer normalisation's vectors, against float64."""

from __future__ import annotations

import numpy as np

from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad
from tests.cpu.check import expected, needs_onednn, run

pytestmark = needs_onednn()


def test_sums_over_many_rows_keep_their_digits() -> None:
    rng = np.random.default_rng(14)
    x, g = (rng.standard_normal((20_000, 4)).astype(np.float32) for _ in range(2))
    scale = rng.standard_normal(4).astype(np.float32)
    _, mean, r = expected(LayerNorm(1, 1e-5), [x])
    _, dscale, dbias = run(LayerNormGrad(1, True), [x, scale, mean, r, g + 1])
    wide = [a.astype(np.float64) for a in (x, g + 1, mean, r)]
    normal = (wide[0] - wide[2][:, None]) * wide[3][:, None]
    np.testing.assert_allclose(dbias, wide[1].sum(0), rtol=1e-6)
    np.testing.assert_allclose(dscale, (wide[1] * normal).sum(0), rtol=1e-6, atol=2e-3)
