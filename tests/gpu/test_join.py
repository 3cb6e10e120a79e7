"""Tensors put into larger ones."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.join import Concat, Pad, Unslice
from foreplan.runtime.cuda.launch import Copy
from tests.gpu.binder import Bound
from tests.gpu.check import check, laid_out, made, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)


def some(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (RNG.standard_normal(shape) * 50).astype(DTYPES[dtype].numpy)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_concat(axis: int, dtype: str) -> None:
    shapes = [[2, 3, 4, 5] for _ in range(3)]
    for shape, extent in zip(shapes, (1, 4, 2)):
        shape[axis] = extent
    given = [some(*shape, dtype=dtype) for shape in shapes]
    last = [channels_last(type_of(x)) for x in given]
    for windows in (None, last, [last[0], *(Window.dense(type_of(x)) for x in given[1:])]):
        check(Concat(axis), *given, windows=windows)


def test_parts_that_lie_in_their_places_are_left_there() -> None:
    given = [some(3, 5, 2), some(4, 5, 2), some(2, 5, 2)]
    kernel, wanted, (layout,) = made(Concat(0), [type_of(x) for x in given])
    assert kernel.parts == ((0, 0, 0), (0, 1, 120), (0, 2, 280))
    assert all(isinstance(each, Copy) for each in kernel.instructions)
    _, y = laid_out(layout)
    y[3:7] = given[1]
    places = [laid_out(window, x)[1] for window, x in zip(wanted, given)]
    Bound(kernel, [places[0], y[3:7], places[2]], [y], np.zeros(0, np.uint8))()
    np.testing.assert_array_equal(y, np.concatenate(given))
    kernel, _, _ = made(Concat(1), [type_of(x) for x in (some(3, 5), some(3, 2))])
    assert kernel.parts == ()


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_pad(mode: str, dtype: str) -> None:
    x = some(2, 3, 6, 5, dtype=dtype)
    for windows in (None, [channels_last(type_of(x))]):
        check(Pad(((0, 0), (1, 2), (3, 0), (2, 4)), 7.0, mode), x, windows=windows)
    check(Pad(((2, 1),), -1.5, mode), some(4, dtype="float32"))


def test_what_a_slice_took_is_put_back() -> None:
    check(Unslice((9, 10), (1, 8), (3, -2)), some(3, 4))
    check(Unslice((2, 7, 3), (0, 2, 0), (1, 1, 1)), some(2, 4, 3))
    check(Unslice((5,), (4,), (-1,)), some(0))
    x = some(2, 3, 4, 4)
    check(Unslice((2, 8, 4, 4), (0, 2, 0, 0), (1, 2, 1, 1)), x, windows=[channels_last(type_of(x))])
