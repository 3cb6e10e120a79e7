"""Slices read at, and added at, the places that indices name."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.types import DTYPES
from foreplan.ops.expr import Arg, maximum
from foreplan.ops.first_equal import FirstEqual
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.map_scatter_add import MapScatterAdd
from foreplan.ops.scatter_reduce import ScatterReduce
from tests.engines.engine import Engine
from tests.kernels import dense, normal
from tests.ops.check import type_of

# Shape of the table, axis, shape of the indices.
CASES = [
    ((5, 17), 0, (3, 4)),
    ((7, 5), 1, (9,)),
    ((3, 6, 2, 4), 1, (5, 2)),
    ((50, 300), 0, (70,)),
    ((4, 2, 300), 1, (3,)),
    ((1, 1), 0, (1,)),
    ((9,), 0, (40,)),
    ((4, 100), 0, ()),
]
FAR = [10**18, -(10**18), 2**63 - 1, -(2**63), 31, -31, 0, 7, -9]  # such as are made of infinities


def table(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).integers(-100, 100, shape).astype(DTYPES[dtype].numpy)


def places(shape: tuple[int, ...], extent: int, dtype: str = "int64") -> np.ndarray:
    low = -extent if dtype.startswith("int") else 0
    return np.random.default_rng(1).integers(low, extent, shape).astype(dtype)


def updates_for(shape: tuple[int, ...], axis: int, indices: tuple[int, ...]) -> np.ndarray:
    return normal(*shape[:axis], *indices, *shape[axis + 1 :])


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
@pytest.mark.parametrize(("shape", "axis", "indices"), CASES)
def test_gather(engine: Engine, shape: tuple[int, ...], axis: int, indices: tuple[int, ...], dtype: str) -> None:
    engine.check(Gather(axis), table(shape, 3), places(indices, shape[axis], dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bool", "int16", "int64", "float64", "bfloat16"])
def test_elements_of_any_size_are_gathered(engine: Engine, dtype: str) -> None:
    engine.check(Gather(0), table((6, 19), 4, dtype), places((8,), 6), rtol=0, atol=0)


def test_nan_and_minus_zero_are_gathered_as_they_are(engine: Engine) -> None:
    data = np.array([[0x7FC12345, 0x80000000], [0xFF800001, 1]], np.uint32).view(np.float32)
    (y,) = engine.run(Gather(0), [data, np.array([1, 0])])
    np.testing.assert_array_equal(y.view(np.uint32), data.view(np.uint32)[::-1])


@pytest.mark.bfloat16
@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize(("shape", "axis", "indices"), CASES)
def test_scatter_add(engine: Engine, shape: tuple[int, ...], axis: int, indices: tuple[int, ...], based: bool) -> None:
    given = [places(indices, shape[axis]), updates_for(shape, axis, indices), *[table(shape, 5)] * based]
    engine.check_over(ScatterAdd(axis, shape), given, None, *[(0, 2)] * based)


@pytest.mark.bfloat16
@pytest.mark.parametrize(("shape", "axis", "indices"), CASES)
def test_map_scatter_add(engine: Engine, shape: tuple[int, ...], axis: int, indices: tuple[int, ...]) -> None:
    """Rows added to the result of a map, beside a number, over either of the tensors that the map reads."""
    given = [places(indices, shape[axis]), updates_for(shape, axis, indices), table(shape, 5), table(shape, 6)]
    op = MapScatterAdd(axis, shape, str(maximum(Arg(0), Arg(2) * Arg(1))))  # exact in bfloat16, too
    engine.check_over(op, [*given, np.array(0.5, np.float32)], None, (0, 2), (0, 3))


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
@pytest.mark.parametrize(("extent", "count"), [(1, 9), (3, 9000), (200, 50), (1000, 4097), (1 << 33, 200), (5, 0)])
def test_first_equal(engine: Engine, extent: int, count: int, dtype: str) -> None:
    indices = places((count,), min(extent, 100), dtype)
    (y,) = engine.run(FirstEqual(extent), [indices])
    found = (indices.astype(np.int64) % extent).tolist()
    np.testing.assert_array_equal(y, np.array([found.index(place) for place in found], np.int64))


@pytest.mark.bfloat16
@pytest.mark.parametrize("how", ["mul", "min", "max"])
@pytest.mark.parametrize(("shape", "axis", "indices"), CASES)
def test_scatter_reduce(engine: Engine, shape: tuple[int, ...], axis: int, indices: tuple[int, ...], how: str) -> None:
    given = [places(indices, shape[axis]), updates_for(shape, axis, indices), table(shape, 5)]
    engine.check_over(ScatterReduce(axis, shape, how), given, None, (0, 2))


@pytest.mark.parametrize("how", ["min", "max"])
def test_nan_wins_among_extremes(engine: Engine, how: str) -> None:
    updates = np.array([[1, np.nan, 3], [np.nan, 0, -3]], np.float32)
    base = np.array([[0, 0, 0], [np.nan, 5, 5]], np.float32)
    (y,) = engine.run(ScatterReduce(0, (2, 3), how), [np.zeros(2, np.int64), updates, base])
    np.testing.assert_array_equal(y, [[np.nan, np.nan, 3 if how == "max" else -3], base[1]])


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64"])
def test_places_far_beyond_either_end_count_modulo_the_axis(engine: Engine, dtype: str) -> None:
    limits = np.iinfo(dtype)
    far = [place for place in (*FAR, limits.min, limits.max) if limits.min <= place <= limits.max]
    indices, within, data = np.array(far, dtype), np.array([place % 10 for place in far]), table((10, 4), 10)
    np.testing.assert_array_equal(engine.run(Gather(0), [data, indices])[0], data[within])
    updates, added = updates_for((10, 4), 0, (len(far),)), np.zeros((10, 4), np.float32)
    np.add.at(added, within, updates)
    np.testing.assert_allclose(engine.run(ScatterAdd(0, (10, 4)), [indices, updates])[0], added, rtol=1e-6)
    first = np.array([within.tolist().index(place) for place in within])
    np.testing.assert_array_equal(engine.run(FirstEqual(10), [indices])[0], first)


def test_updates_and_tables_are_read_as_they_lie(engine: Engine) -> None:
    indices, updates, data = places((8,), 5), updates_for((5, 21), 0, (8,)), normal(6, 4)
    apart = Window(type_of(updates), (4 * 30, 4))
    engine.check(ScatterAdd(0, (5, 21)), indices, updates, windows=[*dense(indices), apart])
    for strides in ((40, 4), (4, 24)):
        engine.check(Gather(0), data, indices, windows=[Window(type_of(data), strides), *dense(indices)])


@pytest.mark.parametrize(("extent", "count"), [(3, 9000), (1000, 4097), (300_000, 200)])
def test_many_updates_are_added_in_their_order(engine: Engine, extent: int, count: int) -> None:
    updates = 1e3 * normal(count, 2)
    engine.check(ScatterAdd(0, (extent, 2)), places((count,), extent), updates, rtol=0, atol=0)


def test_many_updates_of_one_slice_are_added_in_their_order(engine: Engine) -> None:
    updates, wanted = normal(1000, 33), np.zeros(33, np.float32)
    (y,) = engine.run(ScatterAdd(0, (2, 33)), [np.ones(1000, np.int64), updates])
    for row in updates:
        wanted += row
    np.testing.assert_array_equal(y, np.stack([np.zeros(33, np.float32), wanted]))


def test_a_gradient_with_respect_to_a_table_is_the_transpose_of_reading_it(engine: Engine) -> None:
    """<gather(t), u> = <t, scatter_add(u)>, in whole numbers."""
    t, indices, u = table((7, 5), 7), places((4, 3), 7), table((4, 3, 5), 8)
    (y,), (dt,) = engine.run(Gather(0), [t, indices]), engine.run(ScatterAdd(0, (7, 5)), [indices, u])
    assert float((y * u).sum()) == float((t * dt).sum())
