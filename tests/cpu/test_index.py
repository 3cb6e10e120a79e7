"""Gathering and adding slices by compiled loops, against the NumPy kernels."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.runtime.cpu.table import family_of
from tests.cpu.check import check, needs_onednn, run, type_of

pytestmark = needs_onednn()
# Shape of the table, axis, shape of the indices.
CASES = [
    ((5, 17), 0, (3, 4)),
    ((2, 6, 5), 1, (7,)),
    ((3, 4), 1, (2, 2)),
    ((1, 1), 0, (1,)),
    ((9,), 0, (40,)),
    ((4, 100), 0, ()),
]


def table(shape: tuple[int, ...], seed: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).integers(-100, 100, shape).astype(dtype)


def places(shape: tuple[int, ...], extent: int, dtype: type = np.int64) -> np.ndarray:
    low = -extent if np.issubdtype(dtype, np.signedinteger) else 0
    return np.random.default_rng(1).integers(low, extent, shape).astype(dtype)


def updates_for(shape: tuple[int, ...], axis: int, indices: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((*shape[:axis], *indices, *shape[axis + 1 :])).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize(("shape", "axis", "indices"), CASES)
def test_gather(shape: tuple[int, ...], axis: int, indices: tuple[int, ...], dtype: type) -> None:
    check(Gather(axis), table(shape, 3), places(indices, shape[axis], dtype))


@pytest.mark.parametrize("dtype", [np.bool_, np.int16, np.int64, np.float64])
def test_elements_of_any_size_are_gathered(dtype: type) -> None:
    check(Gather(0), table((6, 19), 4, dtype), places((5,), 6))


def test_nan_and_minus_zero_are_gathered_as_they_are() -> None:
    data = np.array([[0x7FC12345, 0x80000000], [0xFF800001, 1]], np.uint32).view(np.float32)
    (y,) = run(Gather(0), [data, np.array([1, 0])])
    np.testing.assert_array_equal(y.view(np.uint32), data.view(np.uint32)[::-1])


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize(("shape", "axis", "indices"), CASES)
def test_scatter_add(shape: tuple[int, ...], axis: int, indices: tuple[int, ...], based: bool) -> None:
    given = [places(indices, shape[axis]), updates_for(shape, axis, indices)]
    if based:
        given.append(table(shape, 5))
        check(ScatterAdd(axis, shape), *given, over=(0, 2))
    check(ScatterAdd(axis, shape), *given)


def test_indices_beyond_the_axis_are_taken_modulo_it() -> None:
    indices = np.array([-11, 12, 10**18, -(2**63), 2**63 - 1])
    check(Gather(0), table((5, 7), 10), indices)
    check(ScatterAdd(0, (5, 7)), indices, updates_for((5, 7), 0, (5,)))


def test_updates_with_gaps_are_read_as_they_lie() -> None:
    indices, updates = places((8,), 5), updates_for((5, 21), 0, (8,))
    windows = [Window.dense(type_of(indices)), Window(type_of(updates), (4 * 30, 4))]
    check(ScatterAdd(0, (5, 21)), indices, updates, windows=windows)


def test_many_updates_of_one_slice_are_added_in_their_order() -> None:
    updates = np.random.default_rng(6).standard_normal((1000, 33)).astype(np.float32)
    (y,) = run(ScatterAdd(0, (2, 33)), [np.ones(1000, np.int64), updates])
    wanted = np.zeros(33, np.float32)
    for row in updates:
        wanted += row
    np.testing.assert_array_equal(y, np.stack([np.zeros(33, np.float32), wanted]))


def test_a_gradient_with_respect_to_a_table_is_the_transpose_of_reading_it() -> None:
    """<gather(t), u> = <t, scatter_add(u)>, in whole numbers."""
    t, indices = table((7, 5), 7), places((4, 3), 7)
    u = table((4, 3, 5), 8)
    (y,), (dt,) = run(Gather(0), [t, indices]), run(ScatterAdd(0, (7, 5)), [indices, u])
    assert float((y * u).sum()) == float((t * dt).sum())


def test_integers_are_not_added_here() -> None:
    op, types = ScatterAdd(0, (3, 2)), [type_of(places((4,), 3)), type_of(table((4, 2), 9, np.int64))]
    assert family_of(op, types, op.infer(types), 1) is None
