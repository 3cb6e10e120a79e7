"""Small products by vector instructions against float64, at every edge, and what is made of them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from foreplan.graph import TensorType, Window, as_dtype
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu.gemm.vectors import SMALL, Vectors
from foreplan.runtime.kernel import Refused
from tests.cpu import products
from tests.cpu.check import needs_onednn
from tests.cpu.products import EPSILON, check_what_is_made, normal, turned

pytestmark = needs_onednn()
SIZES = [
    (1, 1, 1),
    (1, 40, 7),
    (1, 257, 33),
    (2, 31, 19),
    (3, 16, 9),
    (8, 16, 48),
    (9, 17, 49),
    (7, 15, 47),
    (16, 784, 64),
    (64, 16, 100),
    (33, 31, 5),
    (5, 3, 33),
]


multiplied = partial(products.multiplied, Vectors)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_edge(sizes: tuple[int, int, int], layout: str) -> None:
    """A sum of n products is at most n roundings off, of the sum of their magnitudes."""
    rows, depth, columns = sizes
    a, b = normal(rows, depth), normal(depth, columns, seed=1)
    a, b = (turned(x) if kind == "t" else x for x, kind in zip((a, b), layout))
    scale = np.abs(a).astype(np.float64) @ np.abs(b)
    found = multiplied(a, b)
    assert (np.abs(found - a.astype(np.float64) @ b) <= scale * depth * EPSILON).all()
    assert np.sqrt(np.mean(((found - a.astype(np.float64) @ b) / scale) ** 2)) < EPSILON


def test_rows_with_gaps() -> None:
    a, b = normal(20, 50)[:, :30], normal(30, 90, seed=1)[:, 5:50]
    np.testing.assert_allclose(multiplied(a, b), a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(multiplied(a, a.T), a.astype(np.float64) @ a.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row_or_column(number: float) -> None:
    for turn in (False, True):
        for where in (0, 1):
            factors = [normal(10, 20), normal(20, 60, seed=1)]
            factors[where][3, 7] = number
            a, b = factors[0], turned(factors[1]) if turn else factors[1]
            with np.errstate(invalid="ignore"):
                np.testing.assert_allclose(multiplied(a, b), a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("kinds", ["whole", "row", "column", "number"])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_made_of_a_product(sizes: tuple[int, int, int], kinds: str, turn: bool) -> None:
    rows, depth, columns = sizes
    a, b = normal(rows, depth), normal(depth, columns, seed=1)
    check_what_is_made(Vectors, a, turned(b) if turn else b, kinds, depth + 4)


def test_what_is_no_small_product_of_float32() -> None:
    def dense(*shape: int, dtype: str = "float32") -> Window:
        return Window.dense(TensorType(as_dtype(dtype), shape))

    side = round((2 * SMALL) ** (1 / 3)) + 1
    large = [dense(side, side)] * 3
    narrow = [dense(4, 4, dtype="bfloat16")] * 3
    several = [dense(2, 4, 4)] * 3
    turned = [Window(TensorType(FLOAT32, (4, 6)), (4, 16)), Window(TensorType(FLOAT32, (6, 4)), (4, 24)), dense(4, 4)]
    for windows in (large, narrow, several, turned):
        with pytest.raises(Refused):
            Vectors(*windows)
