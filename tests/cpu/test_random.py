"""Random numbers of compiled loops: the bits of NumPy's kernel, which is tested against its authors' vectors."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.random import STATE, Random
from foreplan.runtime.cpu.table import family_of
from tests.cpu.check import check, needs_onednn

pytestmark = needs_onednn()
STATES = [np.array(state, np.uint64) for state in ([0, 0], [12345, 7], [2**64 - 1, 2**64 - 2], [2**32 + 5, 2**32 + 1])]


@pytest.mark.parametrize("state", STATES, ids=lambda state: str(int(state[0]) % 1000))
@pytest.mark.parametrize("shape", [(1,), (4, 16), (63,), (65, 3), (5, 1000), (0, 3), (2, 3, 33, 35)])
def test_the_bits_are_numpys(shape: tuple[int, ...], state: np.ndarray) -> None:
    for dtype in ("bool", "float32", "uint8"):
        check(Random("bernoulli", shape, DTYPES[dtype], 3, p=0.3), state, rtol=0, atol=0)
    check(Random("uniform", shape, stream=2**32 - 1), state, rtol=0, atol=0)
    check(Random("uniform", shape, low=-2.5, high=7.3), state, rtol=0, atol=0)


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-9, 0.999999999])
def test_extreme_probabilities(p: float) -> None:
    check(Random("bernoulli", (4000,), DTYPES["bool"], p=p), STATES[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(dtype: str) -> None:
    check(Random("uniform", (1000,), DTYPES[dtype], low=-1.0, high=1.0), STATES[1], rtol=0, atol=0)
    check(Random("bernoulli", (1000,), DTYPES[dtype], p=0.5), STATES[1], rtol=0, atol=0)


def test_normal_and_float64_numbers_are_left_to_numpy() -> None:
    for op in (Random("normal", (8,)), Random("uniform", (8,), DTYPES["float64"])):
        assert family_of(op, [STATE], op.infer([STATE]), 1) is None
