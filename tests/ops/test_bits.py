"""Packed masks against NumPy's packbits and where, and against their own decompositions."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op
from foreplan.ops.bits import MaskedMap, PackBits
from tests.ops.check import decomposed, refused, run_op

RNG = np.random.default_rng(0)
SHAPES = [(8,), (3, 5, 8), (2, 3, 60_000), (7, 24_000), (40_000, 3), (0, 4)]


def packed(truth: np.ndarray) -> np.ndarray:
    return np.packbits(truth.reshape(-1), bitorder="little")


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_packed_in_c_order_lowest_first(shape: tuple[int, ...]) -> None:
    x = RNG.standard_normal(shape).astype(np.float32)
    (bits,) = run_op(PackBits("(a0 > 0)"), x)
    np.testing.assert_array_equal(bits, packed(x > 0))
    (bits,) = run_op(PackBits("and_((a0 > 0.0), (a0 < 0.5))"), x)
    np.testing.assert_array_equal(bits, packed((x > 0) & (x < 0.5)))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_masked_map_is_a_map_of_truth_values(shape: tuple[int, ...]) -> None:
    x, y = RNG.standard_normal((2, *shape)).astype(np.float32)
    truth = RNG.random(shape) < 0.3
    (out,) = run_op(MaskedMap(("where(a0, a1, 0.0)",)), packed(truth), x)
    np.testing.assert_array_equal(out, np.where(truth, x, 0))
    row = y[:1]
    both = run_op(MaskedMap(("where(a0, (a1 + a2), 0.1)", "(a1 * a2)")), packed(truth), x, row)
    np.testing.assert_array_equal(both[0], np.where(truth, x + row, np.float32(0.1)))
    np.testing.assert_array_equal(both[1], x * row)


@pytest.mark.parametrize(
    "op,arrays",
    [
        (PackBits("(a0 > 0.5)"), [RNG.random((4, 6))]),
        (MaskedMap(("where(a0, a1, neg(a1))",)), [RNG.integers(0, 256, 3, np.uint8), RNG.random((4, 6))]),
    ],
)
def test_decompositions(op: Op, arrays: list[np.ndarray]) -> None:
    np.testing.assert_array_equal(decomposed(op, *arrays), run_op(op, *arrays))


def test_refusals() -> None:
    refused("a multiple of 8 elements", PackBits("(a0 > 0)"), "float64[7]")
    refused("needs a condition", PackBits("(a0 + 1)"), "float64[8]")
    refused("a bit for each element", MaskedMap(("where(a0, a1, 0.0)",)), "uint8[2]", "float64[8]")
