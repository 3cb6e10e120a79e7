"""Cumulative sums, places of extremes, sorting, elements at indices, unstacking."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.index_elements import GatherElements, ScatterElementsAdd
from foreplan.ops.scan import CumSum
from foreplan.ops.sort import ArgReduce, TopK
from foreplan.ops.unstack import Unstack
from tests.gpu.check import check, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]
RNG = np.random.default_rng(0)
SHAPES = [((7,), 0), ((3, 5), 1), ((4, 3, 6), 1), ((2, 300), 1), ((2, 3, 4, 5), 2)]


def with_ties(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.integers(0, 9, shape).astype(DTYPES[dtype].numpy)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_cumulative_sums(shape: tuple[int, ...], axis: int) -> None:
    for exclusive in (False, True):
        for reverse in (False, True):
            check(CumSum(axis, exclusive, reverse), with_ties(*shape), rtol=0, atol=0)
    check(CumSum(axis), with_ties(*shape, dtype="int32"))


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("how", ["max", "min"])
def test_places_of_extremes(how: str, shape: tuple[int, ...], axis: int) -> None:
    for last in (False, True):
        x = with_ties(*shape)
        check(ArgReduce(how, axis, last=last), x, windows=[channels_last(type_of(x))])
        x.reshape(-1)[RNG.integers(0, x.size, 3)] = np.nan
        check(ArgReduce(how, axis, keepdims=True, last=last), x)
    check(ArgReduce(how, axis), with_ties(*shape, dtype="uint8"))


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("largest", [True, False])
def test_largest_and_smallest_in_order(largest: bool, shape: tuple[int, ...], axis: int) -> None:
    for k in {1, shape[axis] // 2, shape[axis]}:
        check(TopK(k, axis, largest), with_ties(*shape))
        check(TopK(k, axis, largest), with_ties(*shape, dtype="int64"))
    x = with_ties(*shape)
    x.reshape(-1)[::4] = np.nan
    check(TopK(shape[axis], axis, largest), x)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_elements_at_indices(shape: tuple[int, ...], axis: int) -> None:
    taken = (*shape[:axis], 6, *shape[axis + 1 :])
    for dtype in ("int64", "int32"):
        places = RNG.integers(-shape[axis], shape[axis], taken).astype(dtype)
        check(GatherElements(axis), with_ties(*shape), places)
        check(ScatterElementsAdd(axis, shape), places, RNG.standard_normal(taken).astype(np.float32))
    far = {"int64": [10**18, -(10**18)], "int32": [], "uint64": [10**18, 2**63]}  # beyond either end
    for dtype, some in far.items():
        limits = np.iinfo(dtype)
        beyond = np.resize(np.array([*some, limits.min, limits.max, 31], dtype), taken)
        check(GatherElements(axis), with_ties(*shape), beyond)
        check(ScatterElementsAdd(axis, shape), beyond, RNG.standard_normal(taken).astype(np.float32))
    check(GatherElements(axis), with_ties(*shape, dtype="bool"), places)
    check(ScatterElementsAdd(axis, shape), places, with_ties(*taken, dtype="int32"))


def test_the_first_axis_taken_apart() -> None:
    x = RNG.standard_normal((3, 4, 5)).astype(np.float32)
    check(Unstack(), x, rtol=0, atol=0)
    check(Unstack(), x, windows=[Window(type_of(x), (4, 60, 12))], rtol=0, atol=0)
