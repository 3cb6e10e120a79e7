"""Sums at places on a card: how positions are sorted, addresses, other types, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import DTYPES
from foreplan.ops.index import ScatterAdd
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.kernels.index import scatter_add
from foreplan.runtime.cuda.launch import Launch
from foreplan.runtime.kernel import Refused
from tests.engines.test_index import places, table
from tests.gpu.check import DEVICE, check, check_unaligned, made, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]


def test_more_slices_than_a_grid_has_rows() -> None:
    check(ScatterAdd(1, (70_000, 8)), places((3,), 8), normal(70_000, 3))
    kernel, *_ = made(ScatterAdd(1, (70_000, 8, 4)), [type_of(places((3,), 8)), type_of(normal(70_000, 3, 4))])
    assert all(each.grid[1:] == (1, 1) for each in kernel.instructions if isinstance(each, Launch))


def test_workspace_has_positions_their_places_and_digits_of_each_tile() -> None:
    rows, few, many = ((50_000, 4), *(TensorType(DTYPES["int64"], (n,)) for n in (4096, 4097)))
    for indices, nbytes in ((few, 3 * 4096 * 4), (many, 3 * 16640 + 2 * 256 * 4)):
        kernel, *_ = made(ScatterAdd(0, rows), [indices, TensorType(DTYPES["bfloat16"], (*indices.shape, 4))])
        assert kernel.workspace == nbytes


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("extent", [2, 40])
def test_slices_of_other_types(dtype: str, extent: int) -> None:
    whole = (table((100, 24), 1) // 33).astype(DTYPES[dtype].numpy)
    check(ScatterAdd(0, (extent, 24)), places((100,), extent), whole, whole[:extent].copy(), rtol=0, atol=0)


@pytest.mark.parametrize("extent", [2, 40])
def test_slices_that_begin_at_unaligned_elements(extent: int) -> None:
    given, op = [places((60,), extent), normal(60, 8)], ScatterAdd(0, (extent, 8))
    check_unaligned(op, *given, rtol=0, atol=0)
    check_unaligned(op, *given, normal(extent, 8), rtol=0, atol=0)


@pytest.mark.parametrize("based", [False, True])
def test_many_slices_of_few_places_are_added_in_parts(based: bool) -> None:
    """Of which most have one place, and one place has none. In whole numbers, so any order gives the same."""
    rng, op = np.random.default_rng(0), ScatterAdd(1, (2, 3, 6))
    indices = rng.choice(2, (96, 128), p=[0.95, 0.05])
    for dtype in ("float32", "float16", "float64"):
        updates = rng.integers(-1, 2, (2, 96, 128, 6)).astype(DTYPES[dtype].numpy)
        base = [rng.integers(-9, 9, (2, 3, 6)).astype(updates.dtype)] * based
        kernel, *_ = made(op, [type_of(x) for x in (indices, updates, *base)])
        *_, parts, last = (each for each in kernel.instructions if isinstance(each, Launch))
        assert (parts.entry, last.entry) == ("scatter_parts", "reduce")
        check(op, indices, updates, *base, over=(0, 2) if based else None, rtol=0, atol=0)
        check_unaligned(op, indices, updates, *base, rtol=0, atol=0)


def test_places_that_are_few_cost_what_was_measured_at_most() -> None:
    """An H200 took 4.8 ms when T5's relative positions were not added in parts."""
    shapes, device = ((512, 512), (512, 512, 8), (32, 8)), device_named("h200")
    indices, updates, table = (
        Window.dense(TensorType(DTYPES[dtype], shape)) for dtype, shape in zip(("int64", "float32", "float32"), shapes)
    )
    kernel = scatter_add(ScatterAdd(0, (32, 8)), [indices, updates], [table], device)
    assert kernel.nanoseconds is not None and kernel.nanoseconds < 100_000
    (parts,) = (each for each in kernel.instructions if isinstance(each, Launch) and each.entry == "scatter_parts")
    assert parts.grid[0] >= 2 * device.multiprocessors
    assert kernel.workspace < 5 << 20


def test_integers_are_not_added_here() -> None:
    whole = [Window.dense(TensorType(DTYPES["int64"], shape)) for shape in ((3,), (3, 2), (4, 2))]
    with pytest.raises(Refused, match="sums"):
        scatter_add(ScatterAdd(0, (4, 2)), whole[:2], whole[2:], DEVICE)
