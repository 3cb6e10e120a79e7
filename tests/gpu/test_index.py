"""Slices read at, and added at, the places that indices name."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import DTYPES
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.index_elements import GatherElements, ScatterElementsAdd
from foreplan.runtime.cuda.kernels.index import scatter_add
from foreplan.runtime.cuda.launch import Launch
from foreplan.runtime.kernel import Refused
from tests.gpu.check import DEVICE, check, check_unaligned, made, run, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


FAR = [10**18, -(10**18), 2**63 - 1, -(2**63), 31, -31, 0]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64"])
def test_places_far_beyond_either_end_count_modulo_the_axis(dtype: str) -> None:
    """Such as those that are made of infinities; they are read, and added to, within the tensor."""
    limits = np.iinfo(dtype)
    far = [place for place in (*FAR, limits.min, limits.max) if limits.min <= place <= limits.max]
    places, within = np.array(far, dtype), np.array([place % 10 for place in far])
    data, updates = f32(10, 4), f32(len(far), 4)
    (found,) = run(Gather(0), [data, places])
    np.testing.assert_array_equal(found, data[within])
    added = np.zeros_like(data)
    np.add.at(added, within, updates)
    (found,) = run(ScatterAdd(0, (10, 4)), [places, updates])
    np.testing.assert_allclose(found, added, rtol=1e-6)
    columns = np.repeat(places[:, None], 4, 1)
    (found,) = run(GatherElements(0), [data, columns])
    np.testing.assert_array_equal(found, data[within])
    (found,) = run(ScatterElementsAdd(0, (10, 4)), [columns, updates])
    np.testing.assert_allclose(found, added, rtol=1e-6)


def test_positions_of_several_tiles_and_places_of_several_digits_stay_in_order() -> None:
    for extent, count in ((3, 9000), (1000, 4097), (300_000, 200)):
        places, updates = RNG.integers(-extent, extent, count), 1e3 * f32(count, 2)
        check(ScatterAdd(0, (extent, 2)), places, updates, rtol=0, atol=0)


def test_more_slices_than_a_grid_has_rows() -> None:
    places = RNG.integers(0, 8, 3)
    check(ScatterAdd(1, (70_000, 8)), places, f32(70_000, 3))
    kernel, *_ = made(ScatterAdd(1, (70_000, 8, 4)), [type_of(places), type_of(f32(70_000, 3, 4))])
    assert all(each.grid[1:] == (1, 1) for each in kernel.instructions if isinstance(each, Launch))


def test_workspace_has_positions_their_places_and_digits_of_each_tile() -> None:
    rows, few, many = ((50_000, 4), *(TensorType(DTYPES["int64"], (n,)) for n in (4096, 4097)))
    for places, nbytes in ((few, 3 * 4096 * 4), (many, 3 * 16640 + 2 * 256 * 4)):
        kernel, *_ = made(ScatterAdd(0, rows), [places, TensorType(DTYPES["bfloat16"], (*places.shape, 4))])
        assert kernel.workspace == nbytes


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("extent", [2, 40])
def test_slices_of_other_types(dtype: str, extent: int) -> None:
    whole = RNG.integers(-3, 3, (100, 24)).astype(DTYPES[dtype].numpy)
    check(ScatterAdd(0, (extent, 24)), RNG.integers(0, extent, 100), whole, whole[:extent].copy(), rtol=0, atol=0)


@pytest.mark.parametrize("extent", [2, 40])
def test_slices_that_begin_at_unaligned_elements(extent: int) -> None:
    places, updates = RNG.integers(0, extent, 60), f32(60, 8)
    check_unaligned(ScatterAdd(0, (extent, 8)), places, updates, rtol=0, atol=0)
    check_unaligned(ScatterAdd(0, (extent, 8)), places, updates, f32(extent, 8), rtol=0, atol=0)


def test_updates_and_data_with_gaps_are_read_as_they_lie() -> None:
    updates, places = f32(6, 4), RNG.integers(0, 5, 6)
    gaps = Window(type_of(updates), (40, 4))
    check(ScatterAdd(0, (5, 4)), places, updates, windows=[Window.dense(type_of(places)), gaps])
    check(Gather(0), updates, places, windows=[gaps, Window.dense(type_of(places))])
    turned = Window(type_of(updates), (4, 24))
    check(Gather(0), updates, places, windows=[turned, Window.dense(type_of(places))])


def test_integers_are_not_added_here() -> None:
    whole = [Window.dense(TensorType(DTYPES["int64"], shape)) for shape in ((3,), (3, 2), (4, 2))]
    with pytest.raises(Refused, match="sums"):
        scatter_add(ScatterAdd(0, (4, 2)), whole[:2], whole[2:], DEVICE)
