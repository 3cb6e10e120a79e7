"""Normalisation of rows on a card: sums in parts, what begins between vectors, other types."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad
from tests.engines.test_row_norm import of_gradient
from tests.gpu.check import check, made, run, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = needs_gcc


def test_sums_over_many_rows_are_taken_in_parts() -> None:
    given = of_gradient(LayerNormGrad, (3, 400, 40), 2, True)
    kernel, _, _ = made(LayerNormGrad(2), [type_of(x) for x in given])
    assert kernel.workspace >= 9 * 2 * 40 * 4
    check(LayerNormGrad(2), *given, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("begins", ["x", "scale", "g", "added"])
def test_what_begins_between_vectors_gives_the_same_numbers(begins: str) -> None:
    given = [*of_gradient(LayerNormGrad, (5, 96), 1, True), normal(5, 96)]
    at = {"x": 0, "scale": 1, "g": 4, "added": 5}[begins]
    found = run(LayerNormGrad(1), given, behind=[int(i == at) for i in range(len(given))])
    whole = run(LayerNormGrad(1), given)
    for one, other in zip(whole, found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [50, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types(dtype: str, width: int) -> None:
    x, g = normal(2, 6, width).astype(DTYPES[dtype].numpy)
    scale = normal(width).astype(np.float64 if dtype == "float64" else np.float32)
    narrow = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-10}[dtype]
    check(LayerNorm(1, 1e-5), x, scale, scale, rtol=narrow, atol=narrow)
    _, *statistics = run(LayerNorm(1, 1e-5), [x])
    check(LayerNormGrad(1), x, scale, *statistics, g, rtol=narrow, atol=3 * narrow)
    check(LayerNormGrad(1), x, scale, *statistics, g, x, over=(0, 5), rtol=narrow, atol=3 * narrow)
    check(LayerNormGrad(1), x, scale, *statistics, g, x, over=(0, 4), rtol=narrow, atol=3 * narrow)
