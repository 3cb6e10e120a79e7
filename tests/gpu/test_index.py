"""Sums at places on a card: how positions are sorted, addresses, other types, what is refused."""

from __future__ import annotations

import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import DTYPES
from foreplan.ops.index import ScatterAdd
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


def test_integers_are_not_added_here() -> None:
    whole = [Window.dense(TensorType(DTYPES["int64"], shape)) for shape in ((3,), (3, 2), (4, 2))]
    with pytest.raises(Refused, match="sums"):
        scatter_add(ScatterAdd(0, (4, 2)), whole[:2], whole[2:], DEVICE)
