"""Random numbers are those of the NumPy kernel."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.random import Random
from tests.gpu.check import check
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
STATES = [np.array(state, np.uint64) for state in ((0, 0), (7, 3), (2**63 + 5, 2**40 + 1))]


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1024,), (7, 293)])
def test_bits_are_the_same(state: np.ndarray, shape: tuple[int, ...]) -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        check(Random("uniform", shape, DTYPES[dtype], 5), state, rtol=0, atol=0)
        check(Random("uniform", shape, DTYPES[dtype], 2**32 - 1, low=-3.5, high=0.1), state, rtol=0, atol=0)
    for dtype in ("bool", "float32", "int64", "float64"):
        check(Random("bernoulli", shape, DTYPES[dtype], 1, p=0.3), state, rtol=0, atol=0)


def test_certain_events() -> None:
    for p in (0.0, 1.0):
        check(Random("bernoulli", (100,), DTYPES["bool"], p=p), STATES[1])


@pytest.mark.parametrize("state", STATES, ids=str)
def test_normal_numbers_are_the_same_up_to_their_last_bits(state: np.ndarray) -> None:
    for shape in ((1,), (2, 501)):
        check(Random("normal", shape, stream=2), state, rtol=1e-5, atol=1e-6)
        check(Random("normal", shape, stream=2, mean=1.5, std=0.2), state, rtol=1e-5, atol=1e-6)
        check(Random("normal", shape, DTYPES["float64"]), state, rtol=1e-13, atol=1e-13)
        check(Random("normal", shape, DTYPES["float16"]), state, rtol=1e-3, atol=1e-4)
