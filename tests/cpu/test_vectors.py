"""Small products by vector instructions against float64, at every edge, and what is made of them."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window, as_dtype
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu.gemm.vectors import SMALL, Vectors
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.kernel import Refused
from tests.cpu.check import laid_out, needs_onednn, type_of
from tests.cpu.products import EPSILON, made_of, normal, turned, updated, window

pytestmark = needs_onednn()
SIZES = [
    (1, 1, 1),
    (1, 40, 7),
    (8, 16, 48),
    (9, 17, 49),
    (7, 15, 47),
    (16, 784, 64),
    (64, 16, 100),
    (33, 31, 5),
    (5, 3, 33),
]


def multiplied(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What the kernel gives, the surroundings of its result watched."""
    fresh = np.full((a.shape[0], b.shape[1]), np.nan, np.float32)
    out = laid_out(fresh, Window.dense(type_of(fresh)))
    Vectors(window(a), window(b), window(out)).bind(
        {c.SRC: a.ctypes.data, c.WEIGHTS: b.ctypes.data, c.DST: out.ctypes.data}
    )()
    assert (out.base[: out.ctypes.data - out.base.ctypes.data] == 0xA5).all()
    assert (out.base[out.ctypes.data - out.base.ctypes.data + out.nbytes :] == 0xA5).all()
    return out


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
    """An update by it, operands as large as it or broadcast, in their place and beside."""
    rows, depth, columns = sizes
    a, b = normal(rows, depth), normal(depth, columns, seed=1)
    b = turned(b) if turn else b
    shapes = {"whole": (rows, columns), "row": (columns,), "column": (rows, 1), "number": (1, 1)}
    w, v = normal(rows, columns, seed=2), normal(*shapes[kinds], seed=3)
    rate = np.full((), 0.25, np.float32)
    wide = a.astype(np.float64) @ b
    scale = np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(w) + np.abs(v)
    for over in ((), (0,), (0, 1)) if kinds == "whole" else ((), (0,)):
        for ours, right in zip(made_of(Vectors, a, b, [w, v, rate], over), updated(wide, w, v, rate)):
            assert (np.abs(ours - right) <= scale * (depth + 4) * EPSILON).all()


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
