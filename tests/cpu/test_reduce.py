"""Sums of the CPU engine, which are as good as exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from foreplan.ops.reduce import Reduce
from tests.cpu.check import needs_onednn, run
from tests.kernels import normal

pytestmark = needs_onednn()


def exact_sum(numbers: np.ndarray) -> float:
    return float(sum((Fraction(float(x)) for x in numbers.reshape(-1)), Fraction(0)))


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2)])
def test_sums_of_halves_are_rounded_once(axes: tuple[int, ...]) -> None:
    x = (3 * normal(6, 5, 40)).astype(np.float16)
    (found,) = run(Reduce("sum", axes), [x])
    np.testing.assert_array_equal(found, x.astype(np.float64).sum(axes).astype(np.float16))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_are_exact_to_half_a_unit_or_so(axis: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3000, 5)) * 10.0 ** rng.integers(-6, 6, (3000, 5))).astype(dtype)
    (found,) = run(Reduce("sum", (axis,)), [np.moveaxis(x, 0, axis).copy()])
    for line, total in zip(x.T, found):
        assert abs(float(total) - exact_sum(line)) <= 0.51 * np.spacing(abs(total))


def test_sums_that_cancel_and_sums_of_a_million() -> None:
    x = np.tile(np.array([1e16, 1.0, -1e16], np.float64), 1000)
    assert run(Reduce("sum", (0,)), [x])[0] == 1000.0
    ones = np.full(1 << 20, 0.1, np.float32)
    assert run(Reduce("sum", (0,)), [ones])[0] == np.float32((1 << 20) * float(np.float32(0.1)))
    assert run(Reduce("mean", (0,)), [ones])[0] == np.float32(0.1)
