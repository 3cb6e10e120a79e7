"""Products in blocks, on tile registers and by vector instructions, against float64 and NumPy's float32, at every edge,
and in any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foreplan.base.units import align_up
from foreplan.graph import TensorType, Window, as_dtype
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu.codegen.epilogue import FURTHER, MADE, Made
from foreplan.runtime.cpu.codegen.loops import WIDTH
from foreplan.runtime.cpu.gemm.blocked import GRAIN
from foreplan.runtime.cpu.gemm.panels import STEPS, Panels
from foreplan.runtime.cpu.gemm.registers import WORTH, Block, edge_of, time_with_edges
from foreplan.runtime.cpu.gemm.tiles import Tiles, available
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.threads import set_threads
from foreplan.runtime.kernel import Refused
from tests.cpu import products
from tests.cpu.check import laid_out, needs_onednn, scratch, type_of
from tests.cpu.products import EPSILON, check_what_is_made, normal, summed, surroundings_are_kept, turned, window
from tests.cpu.tile_registers import in_memory

HUGE = 3.396e38  # would be rounded to infinity as a bfloat16
Way = type[Tiles] | type[Panels]
# How far results may be from sums of the magnitudes, in roundings: tiles round once in 32 products, panels every one.
ALLOWED = {Tiles: 2, Panels: 4}
pytestmark = needs_onednn()


@pytest.fixture(params=[Tiles, Panels])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    if request.param is Tiles and not available():
        in_memory(monkeypatch)
    if request.param is Panels and level() < Level.AVX2:
        pytest.skip("needs a processor with AVX2")
    found: Way = request.param
    return found


def multiplied(way: Way, *arrays: Any, threads: int = 1) -> np.ndarray:
    return products.multiplied(way, *arrays, threads=threads)


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
def test_every_edge(way: Way, sizes: tuple[int, int, int], layout: str) -> None:
    """Products are right up to one rounding, and sums of 32 before they are added; in all, far fewer than the worst."""
    rows, depth, columns = sizes
    a, b, y = normal(rows, depth), normal(depth, columns, seed=1), normal(rows, columns, seed=2)
    a, b = (turned(x) if kind == "t" else x for x, kind in zip((a, b), layout))
    assert error(multiplied(way, a, b), a, b) < ALLOWED[way]
    assert error(multiplied(way, a, b, y), a, b, y) < ALLOWED[way]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("depth", [64, 768, 4096, 25000])
def test_errors_are_those_of_sums_in_blocks(way: Way, depth: int, positive: bool) -> None:
    """Even of long sums: those of 384 products are added up. NumPy's libraries sum otherwise on other processors."""
    a, b = normal(64, depth), normal(depth, 64, seed=1)
    if positive:
        a, b = np.abs(a), np.abs(b)
    wide = a.astype(np.float64) @ b
    ours, theirs = (np.sqrt(np.mean((x - wide) ** 2)) for x in (multiplied(way, a, b), summed(a, b)))
    assert ours < 1.1 * theirs
    assert error(multiplied(way, a, b), a, b) < 8


def test_products_of_all_24_bits_are_exact(way: Way) -> None:
    """Numbers whose product float64 holds, and float32 too: the parts of both meet in every way."""
    rng = np.random.default_rng(0)
    a = np.diag(rng.integers(2**23, 2**24, 64).astype(np.float32))
    b = np.ldexp(np.ones((64, 64), np.float32), rng.integers(-20, 20, (64, 64)))
    np.testing.assert_array_equal(multiplied(way, a, b), a @ b)
    np.testing.assert_array_equal(multiplied(way, b, a), b @ a)


@pytest.mark.parametrize("shapes", [((5, 70, 30), (5, 30, 50)), ((5, 70, 30), (1, 30, 50)), ((2, 3, 40, 65), (65, 9))])
def test_batches(way: Way, shapes: Sequence[tuple[int, ...]]) -> None:
    a, b = normal(*shapes[0]), normal(*shapes[1], seed=1)
    assert error(multiplied(way, a, b), a, b) < ALLOWED[way]
    assert error(multiplied(way, turned(a), turned(b)), a, b) < ALLOWED[way]


def test_rows_with_gaps(way: Way) -> None:
    a, b = normal(70, 100)[:, :60], normal(60, 90, seed=1)[:, 5:50]
    assert error(multiplied(way, a, b), a, b) < ALLOWED[way]
    assert error(multiplied(way, b.T, a.T), b.T, a.T) < ALLOWED[way]


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("shape", [(3, 200, 150, 190), (1, 400, 600, 70), (1, 70, 600, 400), (2, 300, 700, 300)])
def test_threads_change_no_bit(way: Way, shape: tuple[int, int, int, int], layout: str) -> None:
    count, rows, depth, columns = shape
    assert count * rows * depth * columns > 4 * GRAIN
    a, b = normal(count, rows, depth), normal(count, depth, columns, seed=1)
    a, b = (turned(x) if kind == "t" else x for x, kind in zip((a, b), layout))
    alone = multiplied(way, a, b)
    for threads in (2, 3, 4):
        np.testing.assert_array_equal(multiplied(way, a, b, threads=threads), alone)


@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, HUGE, -HUGE])
def test_what_is_not_finite_or_nearly(way: Way, where: str, number: float) -> None:
    """It stays in its row or column, and is what NumPy makes of it."""
    a, b = normal(40, 70), normal(70, 50, seed=1)
    (a if where == "a" else b)[3, 7] = np.float32(number)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = a.astype(np.float64) @ b
        np.testing.assert_allclose(multiplied(way, a, b), wanted.astype(np.float32), rtol=2**-8, atol=1e-5)
    zero = b.copy() if where == "a" else a.copy()
    zero[...] = 0
    found = multiplied(way, a, zero) if where == "a" else multiplied(way, zero, b)
    assert np.isnan(found).any() == (not np.isfinite(number))


@pytest.mark.parametrize("exponent", [-60, -100, 60])
def test_small_and_large_numbers(way: Way, exponent: int) -> None:
    a, b = np.ldexp(normal(40, 70), exponent), np.ldexp(normal(70, 50, seed=1), -exponent // 2)
    assert error(multiplied(way, a, b), a, b) < ALLOWED[way]


def test_what_is_refused(way: Way) -> None:
    a, b, y = (Window.dense(type_of(np.zeros((64, 64), np.float32))) for _ in range(3))
    apart = a.viewed((32, 32), (512, 8))
    for windows in [(apart, b, y), (a, b, y.viewed((64, 64), (4, 256)))]:
        with pytest.raises(Refused, match="with the strides"):
            way(*windows)
    narrow = Window.dense(TensorType(as_dtype("bfloat16"), (64, 64)))
    with pytest.raises(Refused, match="bfloat16"):
        way(narrow, narrow, y)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kinds", ["whole", "row", "column", "number"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (17, 33, 31), (32, 32, 32), (64, 16, 100), (100, 500, 70), (70, 513, 40), (40, 1100, 70),
     (300, 600, 90)],
)  # fmt: skip
def test_what_is_made_of_a_product(way: Way, sizes: tuple[int, int, int], kinds: str, threads: int) -> None:
    """Sums of one pass and more."""
    rows, depth, columns = sizes
    check_what_is_made(way, normal(rows, depth), normal(depth, columns, seed=1), kinds, 2 * ALLOWED[way], threads)


def test_what_is_made_of_narrow_operands(way: Way) -> None:
    """A bfloat16 copy of what is updated, as mixed precision keeps one."""
    a, b, w = normal(40, 50), normal(50, 70, seed=1), normal(40, 70, seed=2).astype(as_dtype("bfloat16").numpy)
    exprs, shape = ("(float32(a1) - a0)", "bfloat16((float32(a1) - a0))"), (40, 70)
    outs = [np.zeros(shape, np.float32), np.zeros(shape, w.dtype)]
    product = way(window(a), window(b), window(outs[0]), made=Made(exprs, (window(w),), tuple(map(window, outs))))
    places = {c.SRC: a, c.WEIGHTS: b, c.DST: outs[0], MADE + 1: outs[1], FURTHER: w}
    memory = scratch(product.scratchpad)
    product.bind({argument: x.ctypes.data for argument, x in {**places, c.SCRATCHPAD: memory}.items()})()
    np.testing.assert_allclose(outs[0], w.astype(np.float32) - a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outs[1], outs[0].astype(w.dtype))


def test_what_cannot_be_made_of_products(way: Way) -> None:
    a, b, y = (Window.dense(TensorType(FLOAT32, shape)) for shape in ((2, 40, 50), (2, 50, 60), (2, 40, 60)))
    made = Made(("(a0 * 2.0)",), (), (y,))
    with pytest.raises(Refused):
        way(a, b, y, made=made)
    flat = [x.viewed(x.shape[1:], x.strides[1:]) for x in (a, b, y)]
    gaps = flat[2].viewed((40, 60), (480, 8))
    with pytest.raises(Refused):
        way(*flat, made=Made(("(a0 + a1)",), (gaps,), (flat[2],)))
    with pytest.raises(Refused):
        way(*flat, made=Made(("(a0 * 2.0)",), (), (flat[2],)), add=True)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_sizes_and_layouts(way: Way, seed: int) -> None:
    """Whole blocks of every kind and others, rows near to one another and far apart, with gaps, of any layout."""
    rng = np.random.default_rng(seed)
    rows, depth, columns = (
        int(
            rng.choice(
                [rng.integers(1, 40), 6 * rng.integers(1, 40), 16 * rng.integers(1, 40), 48 * rng.integers(1, 9)]
            )
        )
        for _ in range(3)
    )

    def drawn(high: int, wide: int, number: int) -> np.ndarray:
        whole = normal(high + int(rng.integers(0, 2)), wide + int(rng.choice([0, 3, 16, 300])), seed=number)
        x = whole[:high, :wide]
        return x.T if rng.integers(0, 2) else x

    a = drawn(rows, depth, 1)
    a = a if a.shape == (rows, depth) else drawn(depth, rows, 1)
    a = a if a.shape == (rows, depth) else a.T
    b = drawn(depth, columns, 2)
    b = b if b.shape == (depth, columns) else drawn(columns, depth, 2)
    b = b if b.shape == (depth, columns) else b.T
    onto = normal(rows, columns, seed=3) if rng.integers(0, 2) else None
    given = (a, b) if onto is None else (a, b, onto)
    threads = int(rng.integers(1, 4))
    assert error(multiplied(way, *given, threads=threads), *given) < 2 * ALLOWED[way]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_epilogues(way: Way, seed: int) -> None:
    """Short ones, which work on registers, and long ones, which work on memory, at whole blocks and at every edge."""
    rng = np.random.default_rng(seed)
    rows, depth, columns = (int(rng.choice([rng.integers(1, 60), 48 * rng.integers(1, 6)])) for _ in range(3))
    depth = int(rng.choice([depth, 2 * STEPS + depth]))
    a, b = normal(rows, depth), normal(depth, columns, seed=1)
    further = normal(*(((rows, columns), (columns,), (rows, 1))[int(rng.integers(3))]), seed=2)
    wide, scale = a.astype(np.float64) @ b + further, np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(further)
    expr, wanted = "max((a0 + a1), 0.0)", np.maximum(wide, 0)
    if rng.integers(2):
        expr, wanted, scale = "(a0 + a1)", wide / 2**12, scale / 2**12
        for _ in range(12):  # halves, in twelve parts that are all different
            expr = f"(0.5 * {expr})"
    out = laid_out(np.full((rows, columns), np.nan, np.float32), Window.dense(TensorType(FLOAT32, (rows, columns))))
    threads = int(rng.integers(1, 4))
    set_threads(threads)
    made = Made((expr,), (window(further).broadcast((rows, columns)),), (window(out),))
    product = way(window(a), window(b), window(out), made=made)
    memory = scratch(product.scratchpad)
    places = {c.SRC: a, c.WEIGHTS: b, c.DST: out, FURTHER: further, c.SCRATCHPAD: memory}
    product.bind({argument: x.ctypes.data for argument, x in places.items()})()
    assert surroundings_are_kept(out)
    assert (np.abs(out - wanted) <= 2 * ALLOWED[way] * EPSILON * scale).all()


def test_edges_take_less_time_than_whole_blocks_and_more_than_none() -> None:
    for block in (Block(8, 3), Block(6, 4), Block(12, 2), Block(6, 1)):
        for rows in range(1, 60):
            for columns in range(1, 200):
                edge = edge_of(block, rows, columns)
                time, without = (WIDTH * time_with_edges(block, x, rows, columns) for x in (edge, Block(0, 0)))
                assert without == align_up(rows, block.rows) * align_up(columns, block.columns)
                assert rows * columns <= time <= without
                assert edge == Block(0, 0) or WORTH * time < without
    if level() >= Level.AVX512:
        assert time_with_edges(Block(8, 3), Block(1, 1), 49, 160) == 6 * (3 * 24 + 8) + 4 * 8
    assert edge_of(Block(8, 3), 12_545, 96) == Block(0, 0)
