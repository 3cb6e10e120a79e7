"""Random numbers that `cpu` leaves to NumPy: normal ones, and those of float64."""

from __future__ import annotations

import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.random import Random
from tests.engines.test_random import EXACT, SHAPES, STATES, state
from tests.gpu.check import check
from tests.gpu.compiled import needs_gcc

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]


@pytest.mark.parametrize("numbers", STATES, ids=str)
def test_bits_of_float64_are_the_same(numbers: tuple[int, int]) -> None:
    for shape in SHAPES:
        check(Random("uniform", shape, DTYPES["float64"], 5), state(numbers), **EXACT)
        check(Random("uniform", shape, DTYPES["float64"], low=-3.5, high=0.1), state(numbers), **EXACT)
        check(Random("bernoulli", shape, DTYPES["float64"], 1, p=0.3), state(numbers), **EXACT)


@pytest.mark.parametrize("numbers", STATES, ids=str)
def test_normal_numbers_are_the_same_up_to_their_last_bits(numbers: tuple[int, int]) -> None:
    for shape in ((1,), (2, 501)):
        check(Random("normal", shape, stream=2), state(numbers), rtol=1e-5, atol=1e-6)
        check(Random("normal", shape, stream=2, mean=1.5, std=0.2), state(numbers), rtol=1e-5, atol=1e-6)
        check(Random("normal", shape, DTYPES["float64"]), state(numbers), rtol=1e-13, atol=1e-13)
        check(Random("normal", shape, DTYPES["float16"]), state(numbers), rtol=1e-3, atol=1e-4)
