"""Pooling's compiled loops against the NumPy kernels, over geometries of every kind and images however they lie."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.window import Pads, count_positions
from tests.cpu.check import check, needs_onednn, run, type_of

pytestmark = needs_onednn()
Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pads, Pair]  # kernel, strides, pads, dilations
CASES: list[tuple[tuple[int, int, int, int], Geometry]] = [
    ((1, 2, 1, 1), ((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))),
    ((2, 5, 7, 9), ((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1))),
    ((2, 19, 8, 7), ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))),
    ((1, 33, 7, 11), ((3, 2), (1, 3), ((1, 0), (0, 1)), (2, 1))),
    ((3, 16, 5, 5), ((5, 5), (1, 1), ((2, 2), (2, 2)), (1, 1))),
    ((2, 40, 6, 4), ((6, 4), (6, 4), ((0, 0), (0, 0)), (1, 1))),
    ((2, 17, 9, 9), ((2, 3), (2, 2), ((-1, 0), (0, -2)), (1, 2))),
    ((1, 3, 4, 4), ((2, 2), (3, 3), ((1, 2), (0, 1)), (1, 1))),
]


def images(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)  # with ties


def pooled(shape: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    return (*shape[:2], *count_positions(shape[2:], *geometry))


def checked(op: Op, *given: np.ndarray) -> None:
    """In both ways that images lie, and as some of the channels of wider ones."""
    check(op, *given)
    check(op, *given, windows=[channels_last(type_of(x)) for x in given])
    check(op, *given, windows=[wider(x) for x in given])


def wider(array: np.ndarray) -> Window:
    _, channels, height, width = array.shape
    step = array.itemsize * (channels + 5)
    return Window(type_of(array), (height * width * step, array.itemsize, width * step, step))


@pytest.mark.parametrize(("shape", "geometry"), CASES)
def test_largest(shape: tuple[int, ...], geometry: Geometry) -> None:
    for save_index in (False, True):
        checked(MaxPool(*geometry, save_index), images(shape, 1))


@pytest.mark.parametrize(("shape", "geometry"), CASES)
def test_gradient_of_the_largest(shape: tuple[int, ...], geometry: Geometry) -> None:
    given = pooled(shape, geometry)
    index = np.random.default_rng(2).integers(0, math.prod(geometry[0]), given).astype(np.uint8)
    checked(MaxPoolGrad(*geometry, shape=shape), index, images(given, 3))


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("shape", "geometry"), CASES)
def test_mean(shape: tuple[int, ...], geometry: Geometry, counted: bool) -> None:
    checked(AvgPool(*geometry, counted), images(shape, 4))
    checked(AvgPoolGrad(*geometry, counted, shape=shape), images(pooled(shape, geometry), 5))


def test_windows_that_ceil_mode_adds_do_not_count_beyond_the_padding() -> None:
    geometry = ((2, 2), (2, 2), ((0, 1), (1, 1)), (1, 1))
    checked(AvgPool(*geometry, True, (1, 0)), images((2, 18, 5, 4), 6))


def test_the_first_of_equal_elements_wins_and_its_gradient_goes_there() -> None:
    x = np.zeros((1, 20, 4, 4), np.float32)
    y, index = run(MaxPool((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1), True), [x])
    assert not index.any() and not y.any()
    g = np.ones_like(y)
    (dx,) = run(MaxPoolGrad((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1), x.shape), [index, g])
    wanted = np.zeros_like(x)
    wanted[:, :, ::2, ::2] = 1
    np.testing.assert_array_equal(dx, wanted)


def test_nan_wins_and_infinities_are_numbers() -> None:
    x = images((2, 21, 6, 6), 7)
    x[0, 3, 2, 2] = x[1, 20, 0, 0] = np.nan
    x[0, 4], x[1, 5, 3, 3] = -np.inf, np.inf
    for kernel, stride, pad in ((3, 2, 1), (2, 1, 0)):
        op = MaxPool((kernel,) * 2, (stride,) * 2, ((pad, pad),) * 2, (1, 1))
        check(op, x)
        y, index = run(MaxPool((kernel,) * 2, (stride,) * 2, ((pad, pad),) * 2, (1, 1), True), [x])
        for n, c, i, j in np.argwhere(np.isnan(y)):
            tap = divmod(int(index[n, c, i, j]), kernel)
            assert np.isnan(x[n, c, i * stride - pad + tap[0], j * stride - pad + tap[1]])


def test_an_index_of_two_bytes_has_no_kernel() -> None:
    from foreplan.runtime.cpu.table import family_of

    op = MaxPool((17, 17), (1, 1), ((0, 0), (0, 0)), (1, 1), True)
    x = type_of(images((1, 4, 17, 17), 8))
    assert family_of(op, [x], op.infer([x]), 1) is None
