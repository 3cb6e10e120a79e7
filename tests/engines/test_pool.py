"""Pooling and its gradients over geometries of every kind, images however they lie."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.window import Pads, count_positions
from tests.engines.engine import Engine
from tests.kernels import layouts
from tests.ops.check import type_of

# shape, then kernel, strides, pads, dilations
CASES = {
    "one element": ((1, 2, 1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "2x2": ((2, 5, 7, 9), (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    "3x3": ((2, 19, 8, 7), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    "dilated": ((1, 33, 7, 11), (3, 2), (1, 3), ((1, 0), (0, 1)), (2, 1)),
    "overlapping": ((3, 16, 5, 5), (5, 5), (1, 1), ((2, 2), (2, 2)), (1, 1)),
    "whole images": ((2, 40, 6, 4), (6, 4), (6, 4), ((0, 0), (0, 0)), (1, 1)),
    "cropped": ((2, 17, 9, 9), (2, 3), (2, 2), ((-1, 0), (0, -2)), (1, 2)),
    "with gaps": ((1, 3, 4, 4), (2, 2), (3, 3), ((1, 2), (0, 1)), (1, 1)),
    "3x3 of 24": ((2, 24, 9, 8), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    "side by side": ((1, 32, 9, 11), (3, 4), (3, 4), ((0, 1), (2, 0)), (1, 1)),
    "dilated of 8": ((2, 8, 13, 10), (3, 2), (2, 1), ((2, -1), (-2, 3)), (2, 3)),
}
PLANES = {  # images of one channel, of whose largest elements `cpu` has no kernel
    "one pixel": ((1, 1, 1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "along columns": ((2, 1, 19, 35), (5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1)),
    "columns shorter than windows": ((2, 1, 3, 6), (5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1)),
    "along rows": ((3, 1, 7, 40), (1, 4), (1, 1), ((0, 0), (1, 2)), (1, 1)),
    "3x3 of a plane": ((2, 1, 9, 17), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    "dilated of a plane": ((1, 1, 11, 13), (3, 2), (1, 3), ((1, 0), (0, 1)), (2, 2)),
    "cropped of a plane": ((2, 1, 9, 9), (2, 3), (2, 2), ((-1, 0), (0, -2)), (1, 2)),
    "with gaps of a plane": ((1, 1, 4, 4), (2, 2), (3, 3), ((1, 2), (0, 1)), (1, 1)),
}


def images(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)  # with ties


def pooled(case: str) -> tuple[int, ...]:
    shape, *geometry = (CASES | PLANES)[case]
    return (*shape[:2], *count_positions(shape[2:], *geometry))


def wider(array: np.ndarray, more: int = 5) -> Window:
    """Some of the channels of wider images, which lie last."""
    _, channels, height, width = array.shape
    step = array.itemsize * (channels + more)
    return Window(type_of(array), (height * width * step, array.itemsize, width * step, step))


def planes(array: np.ndarray) -> tuple[Window, Window]:
    """Images of one channel: the elements of a column side by side, and some columns of wider images."""
    (_, _, down, across), item = array.shape, array.itemsize
    image, row = down * across * item, (across + 3) * item
    strides = (image, image, item, down * item), (down * row, down * row, row, item)
    return Window(type_of(array), strides[0]), Window(type_of(array), strides[1])


def checked(engine: Engine, op: Op, *given: np.ndarray) -> None:
    """In both orders of channels, as some of those of wider images, and in what ways images of one channel lie."""
    ways = [*layouts(*given), [wider(x) for x in given]]
    if given[0].shape[1] == 1:
        ways += [list(windows) for windows in zip(*map(planes, given))]
    engine.check_lying(op, *given, ways=ways)


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", CASES)
def test_largest(engine: Engine, case: str) -> None:
    shape, *geometry = CASES[case]
    checked(engine, MaxPool(*geometry), images(shape, 0))
    checked(engine, MaxPool(*geometry, save_index=True), images(shape, 0))
    _, index = engine.run(MaxPool(*geometry, save_index=True), [images(shape, 0)])
    checked(engine, MaxPoolGrad(*geometry, shape=shape), index, images(pooled(case), 1))


@pytest.mark.bfloat16
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("case", CASES | PLANES)
def test_mean(engine: Engine, case: str, counted: bool) -> None:
    shape, *geometry = (CASES | PLANES)[case]
    checked(engine, AvgPool(*geometry, counted), images(shape, 0))
    checked(engine, AvgPoolGrad(*geometry, counted, shape=shape), images(pooled(case), 1))


def test_channels_of_wider_images_that_begin_at_whole_vectors(engine: Engine) -> None:
    shape, *geometry = CASES["3x3 of 24"]
    x = images(shape, 0)
    for op in (MaxPool(*geometry, save_index=True), AvgPool(*geometry)):
        engine.check(op, x, windows=[wider(x, 8)])


@pytest.mark.bfloat16
def test_nan_stays_within_the_windows_of_a_mean(engine: Engine) -> None:
    x = images((1, 1, 12, 20), 3)
    x[0, 0, 4, 7], x[0, 0, 9, 3] = np.nan, np.inf
    checked(engine, AvgPool((5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1), True), x)


@pytest.mark.parametrize(("kernel", "pads"), [((3, 2), ((1, 2), (0, 1))), ((2, 2), ((0, 1), (1, 1)))])
def test_windows_that_ceil_mode_adds_do_not_count_beyond_the_padding(
    engine: Engine, kernel: tuple[int, ...], pads: Pads
) -> None:
    geometry, x = (kernel, (2, 2), pads, (1, 1)), images((2, 6, 6, 5), 0)
    checked(engine, AvgPool(*geometry, True, (1, 1)), x)
    g = images((2, 6, *count_positions((6, 5), *geometry)), 1)
    checked(engine, AvgPoolGrad(*geometry, True, (1, 1), shape=x.shape), g)


def test_the_first_of_equal_elements_wins_and_its_gradient_goes_there(engine: Engine) -> None:
    x, geometry = np.zeros((1, 20, 4, 4), np.float32), ((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1))
    y, index = engine.run(MaxPool(*geometry, True), [x])
    assert not index.any() and not y.any()
    (dx,) = engine.run(MaxPoolGrad(*geometry, x.shape), [index, np.ones_like(y)])
    wanted = np.zeros_like(x)
    wanted[:, :, ::2, ::2] = 1
    np.testing.assert_array_equal(dx, wanted)


@pytest.mark.bfloat16
def test_nan_wins_and_infinities_are_numbers(engine: Engine) -> None:
    x = images((2, 21, 6, 6), 7)
    x[0, 3, 2, 2] = x[1, 20, 0, 0] = np.nan
    x[0, 4], x[1, 5, 3, 3] = -np.inf, np.inf
    for kernel, stride, pad in ((3, 2, 1), (3, 1, 1), (2, 1, 0)):
        geometry = ((kernel,) * 2, (stride,) * 2, ((pad, pad),) * 2, (1, 1))
        engine.check(MaxPool(*geometry), x)
        y, index = engine.run(MaxPool(*geometry, True), [x])
        for n, c, i, j in np.argwhere(np.isnan(y)):
            tap = divmod(int(index[n, c, i, j]), kernel)
            assert np.isnan(x[n, c, i * stride - pad + tap[0], j * stride - pad + tap[1]])
