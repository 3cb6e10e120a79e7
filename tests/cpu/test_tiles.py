"""Products on tile registers against float64 and NumPy's float32, at every edge, and in any number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from foreplan.cpu import library as c
from foreplan.cpu.kernel import Refused
from foreplan.cpu.threads import set_threads
from foreplan.cpu.tiles import GRAIN, Tiles, available
from foreplan.graph import TensorType, Window, as_dtype
from tests.cpu.check import laid_out, needs_onednn, scratch, type_of

pytestmark = [needs_onednn(), pytest.mark.skipif(not available(), reason="this processor has no tile registers")]
EPSILON = float(np.finfo(np.float32).eps)
HUGE = 3.396e38  # would be rounded to infinity as a bfloat16


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def turned(x: np.ndarray) -> np.ndarray:
    """The same matrices, elements side by side along the other axis."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def window(x: np.ndarray) -> Window:
    return Window(type_of(x), x.strides)


def multiplied(a: np.ndarray, b: np.ndarray, onto: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
    """What the kernel gives, twice over, its memory poisoned and the surroundings of its result watched."""
    y = np.full((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), np.nan, np.float32)
    results = []
    for poison in (0xFF, 0x7F):
        out = laid_out(y if onto is None else onto, Window.dense(type_of(y)))
        set_threads(threads)
        product = Tiles(window(a), window(b), window(out), add=onto is not None)
        memory = scratch(product.scratchpad)
        memory[...] = poison
        places = (a, b, out, memory)
        arguments = (c.SRC, c.WEIGHTS, c.DST, c.SCRATCHPAD)
        product.bind({argument: x.ctypes.data for argument, x in zip(arguments, places)})()
        assert (out.base[: out.ctypes.data - out.base.ctypes.data] == 0xA5).all()
        assert (out.base[out.ctypes.data - out.base.ctypes.data + out.nbytes :] == 0xA5).all()
        results.append(out)
    np.testing.assert_array_equal(*results)
    return results[0]


def error(found: np.ndarray, a: np.ndarray, b: np.ndarray, onto: np.ndarray | None = None) -> float:
    """The largest error, of the sum of the products' magnitudes, in roundings of float32."""
    wide, scale = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
    if onto is not None:
        wide, scale = wide + onto, scale + np.abs(onto)
    return float((np.abs(found - wide) / scale).max() / EPSILON)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (1, 40, 7), (16, 32, 16), (17, 33, 31), (32, 32, 32), (33, 64, 48), (47, 100, 130), (256, 512, 64),
     (257, 513, 65), (300, 1030, 97), (97, 1030, 300), (600, 70, 33), (33, 70, 600)],
)  # fmt: skip
def test_every_edge(sizes: tuple[int, int, int], layout: str) -> None:
    """Products are right up to one rounding, and sums of 32 before they are added; in all, far fewer than the worst."""
    rows, depth, columns = sizes
    a, b, y = normal(rows, depth), normal(depth, columns, seed=1), normal(rows, columns, seed=2)
    a, b = (turned(x) if kind == "t" else x for x, kind in zip((a, b), layout))
    assert error(multiplied(a, b), a, b) < 2
    assert error(multiplied(a, b, y), a, b, y) < 2


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("depth", [64, 768, 4096, 25000])
def test_errors_are_below_those_of_numpy(depth: int, positive: bool) -> None:
    """Even of long sums: blocks of 512 are added up one by one."""
    a, b = normal(64, depth), normal(depth, 64, seed=1)
    if positive:
        a, b = np.abs(a), np.abs(b)
    wide = a.astype(np.float64) @ b
    ours, theirs = (np.sqrt(np.mean((x - wide) ** 2)) for x in (multiplied(a, b), np.matmul(a, b)))
    assert ours < 1.1 * theirs
    assert error(multiplied(a, b), a, b) < 8


def test_products_of_all_24_bits_are_exact() -> None:
    """Numbers whose product float64 holds, and float32 too: the parts of both meet in every way."""
    rng = np.random.default_rng(0)
    a = np.diag(rng.integers(2**23, 2**24, 64).astype(np.float32))
    b = np.ldexp(np.ones((64, 64), np.float32), rng.integers(-20, 20, (64, 64)))
    np.testing.assert_array_equal(multiplied(a, b), a @ b)
    np.testing.assert_array_equal(multiplied(b, a), b @ a)


@pytest.mark.parametrize("shapes", [((5, 70, 30), (5, 30, 50)), ((5, 70, 30), (1, 30, 50)), ((2, 3, 40, 65), (65, 9))])
def test_batches(shapes: Sequence[tuple[int, ...]]) -> None:
    a, b = normal(*shapes[0]), normal(*shapes[1], seed=1)
    assert error(multiplied(a, b), a, b) < 2
    assert error(multiplied(turned(a), turned(b)), a, b) < 2


def test_rows_with_gaps() -> None:
    a, b = normal(70, 100)[:, :60], normal(60, 90, seed=1)[:, 5:50]
    assert error(multiplied(a, b), a, b) < 2
    assert error(multiplied(b.T, a.T), b.T, a.T) < 2


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("shape", [(3, 200, 150, 190), (1, 400, 600, 70), (1, 70, 600, 400), (2, 300, 700, 300)])
def test_threads_change_no_bit(shape: tuple[int, int, int, int], layout: str) -> None:
    count, rows, depth, columns = shape
    assert count * rows * depth * columns > 4 * GRAIN
    a, b = normal(count, rows, depth), normal(count, depth, columns, seed=1)
    a, b = (turned(x) if kind == "t" else x for x, kind in zip((a, b), layout))
    alone = multiplied(a, b)
    for threads in (2, 3, 4):
        np.testing.assert_array_equal(multiplied(a, b, threads=threads), alone)


@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, HUGE, -HUGE])
def test_what_is_not_finite_or_nearly(where: str, number: float) -> None:
    """It stays in its row or column, and is what NumPy makes of it."""
    a, b = normal(40, 70), normal(70, 50, seed=1)
    (a if where == "a" else b)[3, 7] = np.float32(number)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = a.astype(np.float64) @ b
        np.testing.assert_allclose(multiplied(a, b), wanted.astype(np.float32), rtol=2**-8, atol=1e-5)
    zero = b.copy() if where == "a" else a.copy()
    zero[...] = 0
    found = multiplied(a, zero) if where == "a" else multiplied(zero, b)
    assert np.isnan(found).any() == (not np.isfinite(number))


@pytest.mark.parametrize("exponent", [-60, -100, 60])
def test_small_and_large_numbers(exponent: int) -> None:
    a, b = np.ldexp(normal(40, 70), exponent), np.ldexp(normal(70, 50, seed=1), -exponent // 2)
    assert error(multiplied(a, b), a, b) < 2


def test_what_is_refused() -> None:
    a, b, y = (Window.dense(type_of(np.zeros((64, 64), np.float32))) for _ in range(3))
    apart = a.viewed((32, 32), (512, 8))
    for windows in [(apart, b, y), (a, b, y.viewed((64, 64), (4, 256)))]:
        with pytest.raises(Refused, match="with the strides"):
            Tiles(*windows)
    narrow = Window.dense(TensorType(as_dtype("bfloat16"), (64, 64)))
    with pytest.raises(Refused, match="bfloat16"):
        Tiles(narrow, narrow, y)
