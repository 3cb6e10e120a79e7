"""Gather and scatter-add against NumPy's indexing and `np.add.at`, one-hot by definition."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder
from foreplan.ops.first_equal import FirstEqual
from foreplan.ops.index import Gather, ScatterAdd, gather, gather_nd, one_hot
from foreplan.ops.index_elements import GatherElements, ScatterElementsAdd, gather_elements
from foreplan.ops.map_scatter_add import MapScatterAdd
from tests.ops.check import built, check_vjp, run_op, type_of

RNG = np.random.default_rng(0)


def indices_for(extent: int, shape: tuple[int, ...], dtype: str = "int64") -> np.ndarray:
    return RNG.integers(-extent, extent, shape).astype(dtype)


def scattered(shape: tuple[int, ...], axis: int, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """One addition after the other."""
    out = np.zeros(shape, updates.dtype)
    moved = np.moveaxis(out, axis, 0)
    rows = updates.reshape(*shape[:axis], indices.size, *shape[axis + 1 :])
    for index, row in zip(indices.reshape(-1), np.moveaxis(rows, axis, 0)):
        moved[index] += row
    return out


def test_long_index_lists() -> None:
    for shape, axis in (((50, 3), 0), ((3, 50), 1), ((50, 130), 0), ((2, 50, 70), 1)):
        for dtype in (np.int64, np.int32):
            data = RNG.standard_normal(shape).astype(np.float32)
            indices = indices_for(50, (20000 if shape[-1] < 70 else 2500,)).astype(dtype)
            (y,) = run_op(Gather(axis), data, indices)
            np.testing.assert_array_equal(y, np.take(data, indices, axis))
            (sums,) = run_op(ScatterAdd(axis, shape), indices, y)
            wanted = scattered(shape, axis, indices, y.astype(np.float64))
            np.testing.assert_allclose(sums, wanted, rtol=2e-4, atol=1e-2)


FAR = [-(2**63), 2**63 - 1, 10**18, -(10**18), 7, -8, 3]


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32"])
@pytest.mark.parametrize("width", [2, 300])
@pytest.mark.parametrize("count", [len(FAR), 20000])
def test_indices_far_outside_count_modulo_the_axis(dtype: str, width: int, count: int) -> None:
    """Such as NaN, infinity and 1e18 give when they are converted: read and added within the axis, and at once."""
    indices = np.resize(np.array(FAR), count).astype(dtype)
    places = indices.astype(object) % 5
    data = RNG.standard_normal((5, width)).astype(np.float32)
    wanted = data[places.astype(int)]
    np.testing.assert_array_equal(run_op(Gather(0), data, indices)[0], wanted)
    rows = np.ones(wanted.shape, np.float32)
    counts = np.bincount(places.astype(int), minlength=5)[:, None] * np.ones((1, width))
    np.testing.assert_array_equal(run_op(ScatterAdd(0, data.shape), indices, rows)[0], counts)
    if width == 2:
        both = np.stack([indices, indices], axis=1)
        np.testing.assert_array_equal(run_op(GatherElements(0), data, both)[0], wanted)
        np.testing.assert_array_equal(run_op(ScatterElementsAdd(0, data.shape), both, rows)[0], counts)


def test_rows_are_added_to_the_result_of_a_map() -> None:
    data, rows, indices = RNG.standard_normal((6, 4)), RNG.standard_normal((5, 4)), np.array([3, -1, 3, 0, 3])
    (y,) = run_op(MapScatterAdd(0, (6, 4), "(0.5 * a0)"), indices, rows, data)
    wanted = 0.5 * data
    np.add.at(wanted, indices, rows)
    np.testing.assert_array_equal(y, wanted)
    b = GraphBuilder("g")
    x, u, i = (b.input(name, type_of(array)) for name, array in (("x", data), ("u", rows), ("i", indices)))
    with pytest.raises(ShapeError, match="one input of its map at least"):
        b.apply(MapScatterAdd(0, (6, 4), "(0.5 * a0)"), i, u)
    with pytest.raises(ShapeError, match="updates must be"):
        b.apply(MapScatterAdd(0, (6, 4), "(0.5 * a0)"), i, x, x)
    with pytest.raises(ShapeError, match="must be"):
        b.apply(MapScatterAdd(0, (7, 4), "(0.5 * a0)"), i, u, x)


def test_element_gradients_with_smaller_indices() -> None:
    data, indices = RNG.standard_normal((4, 5)), indices_for(5, (3, 6))
    (found,) = built(lambda b, x, i: gather_elements(b, x, i, -1), data, indices)
    np.testing.assert_array_equal(found, np.take_along_axis(data[:3], indices, 1))
    check_vjp(lambda b, x, i: gather_elements(b, x, i, 1), data, indices)
    check_vjp(lambda b, i, u: b.apply(ScatterElementsAdd(1, (3, 7)), i, u), indices, RNG.standard_normal((3, 6)))


@pytest.mark.parametrize("batch_dims", [0, 1])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_gather_nd(batch_dims: int, dtype: str) -> None:
    data = RNG.standard_normal((2, 3, 4, 5))
    indices = np.stack([indices_for(2 if batch_dims == 0 else 3, (2, 6)), indices_for(3, (2, 6))], -1).astype(dtype)
    (found,) = built(lambda b, x, i: gather_nd(b, x, i, batch_dims), data, indices)
    if batch_dims:
        wanted = np.stack([data[n][tuple(np.moveaxis(indices[n], -1, 0))] for n in range(2)])
    else:
        wanted = data[tuple(np.moveaxis(indices, -1, 0))]
    np.testing.assert_array_equal(found, wanted)
    check_vjp(lambda b, x, i: gather_nd(b, x, i, batch_dims), data, indices)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8"])
def test_one_hot(dtype: str) -> None:
    indices = np.array([[0, 3, 2], [5, 1, 4]], dtype)
    if not dtype.startswith("u"):
        indices[1, 0] = -2
    for depth in (4, 300):
        for axis in (-1, 0, 1):
            (made,) = built(lambda b, i, depth=depth, axis=axis: one_hot(b, i, depth, axis, "float64"), indices)
            found = np.moveaxis(made, axis, -1)
            wanted = np.zeros((2, 3, depth))
            for place in np.ndindex(2, 3):
                if -depth <= indices[place] < depth:
                    wanted[place][indices[place]] = 1
            np.testing.assert_array_equal(found, wanted)


def test_valid_range_and_refusals() -> None:
    data, indices = type_of(np.zeros((4, 5))), type_of(np.zeros(3, np.int64))
    assert Gather(1).valid_range(1, [data, indices]) == (-5, 4)
    assert Gather(1).valid_range(0, [data, indices]) is None
    assert ScatterAdd(0, (4, 5)).valid_range(0, [indices, data]) == (-4, 3)
    b = GraphBuilder()
    x, f = b.input("x", data), b.input("f", type_of(np.zeros(3)))
    with pytest.raises(ShapeError, match="indices must be integers"):
        gather(b, x, f)
    i = b.input("i", indices)
    with pytest.raises(ShapeError, match="updates must be"):
        b.apply(ScatterAdd(0, (4, 5)), i, x)
    with pytest.raises(ShapeError, match="same number of axes"):
        gather_elements(b, x, i)
    for positions in (i, b.input("one", type_of(np.array(0)))):
        with pytest.raises(ShapeError, match="the last axis of the indices must have"):
            gather_nd(b, x, positions)


def test_first_equal_of_something_else() -> None:
    for indices, extent in ((np.zeros(2), 3), (np.zeros((2, 2), np.int64), 3), (np.zeros(2, np.int64), 0)):
        with pytest.raises(ShapeError):
            FirstEqual(extent).infer([type_of(indices)])
    with pytest.raises(ShapeError, match="cannot compare"):
        FirstEqual(1 << 62).infer([type_of(np.zeros(2, np.int64))])
