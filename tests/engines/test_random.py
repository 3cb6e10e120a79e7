"""Random numbers: the bits of NumPy's kernel, which is tested against its authors' vectors."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.random import Random
from tests.engines.engine import Engine
from tests.profile import values

EXACT = {"rtol": 0.0, "atol": 0.0}
STATES = [(0, 0), (12345, 7), (2**64 - 1, 2**64 - 2), (2**32 + 5, 2**32 + 1), (2**63 + 5, 2**40 + 1)]
SHAPES = [(), (1,), (3, 5), (4, 16), (63,), (65, 3), (1024,), (7, 293), (5, 1000), (0, 3), (2, 3, 33, 35)]


def state(numbers: tuple[int, int] = STATES[1]) -> np.ndarray:
    return np.array(numbers, np.uint64)


@pytest.mark.parametrize(("shape", "numbers"), values(SHAPES, STATES), ids=str)
def test_bits_are_the_same(engine: Engine, shape: tuple[int, ...], numbers: tuple[int, int]) -> None:
    for dtype in ("bool", "float32", "uint8", "int64"):
        engine.check(Random("bernoulli", shape, DTYPES[dtype], 3, p=0.3), state(numbers), **EXACT)
    for dtype in ("float32", "bfloat16"):
        engine.check(Random("uniform", shape, DTYPES[dtype], 2**32 - 1), state(numbers), **EXACT)
        engine.check(Random("uniform", shape, DTYPES[dtype], low=-2.5, high=7.3), state(numbers), **EXACT)


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-9, 0.999999999])
def test_extreme_probabilities(engine: Engine, p: float) -> None:
    engine.check(Random("bernoulli", (4000,), DTYPES["bool"], p=p), state(), **EXACT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(engine: Engine, dtype: str) -> None:
    engine.check(Random("uniform", (1000,), DTYPES[dtype], low=-1.0, high=1.0), state(), **EXACT)
    engine.check(Random("bernoulli", (1000,), DTYPES[dtype], p=0.5), state(), **EXACT)
