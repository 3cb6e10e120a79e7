"""Means over windows of images of one channel, whichever axis lies side by side."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.ops.pool import AvgPool, AvgPoolGrad
from foreplan.ops.window import Pads, count_positions
from tests.engines.engine import Engine
from tests.kernels import dense, normal
from tests.ops.check import type_of

Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pads, Pair]  # kernel, strides, pads, dilations
CASES: list[tuple[tuple[int, int, int, int], Geometry]] = [
    ((1, 1, 1, 1), ((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))),
    ((2, 1, 19, 35), ((5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1))),  # as over channels
    ((2, 1, 3, 6), ((5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1))),  # windows wider than there are channels
    ((3, 1, 7, 40), ((1, 4), (1, 1), ((0, 0), (1, 2)), (1, 1))),
    ((2, 1, 9, 17), ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))),
    ((1, 1, 11, 13), ((3, 2), (1, 3), ((1, 0), (0, 1)), (2, 2))),
    ((2, 1, 9, 9), ((2, 3), (2, 2), ((-1, 0), (0, -2)), (1, 2))),
    ((1, 1, 4, 4), ((2, 2), (3, 3), ((1, 2), (0, 1)), (1, 1))),
]


def turned(array: np.ndarray) -> Window:
    """Columns side by side."""
    _, _, down, across = array.shape
    item = array.itemsize
    return Window(type_of(array), (down * across * item, down * across * item, item, down * item))


def wider(array: np.ndarray) -> Window:
    """Some columns of wider images."""
    _, _, down, across = array.shape
    row = (across + 3) * array.itemsize
    return Window(type_of(array), (down * row, down * row, row, array.itemsize))


def checked(engine: Engine, op: Op, given: np.ndarray) -> None:
    engine.check_lying(op, given, ways=[dense(given), [turned(given)], [wider(given)]])


@pytest.mark.bfloat16
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("shape", "geometry"), CASES)
def test_means(engine: Engine, shape: tuple[int, ...], geometry: Geometry, counted: bool) -> None:
    checked(engine, AvgPool(*geometry, counted), normal(*shape))
    g = normal(*shape[:2], *count_positions(shape[2:], *geometry), seed=1)
    checked(engine, AvgPoolGrad(*geometry, counted, shape=shape), g)


@pytest.mark.bfloat16
def test_nan_stays_within_its_windows(engine: Engine) -> None:
    x = normal(1, 1, 12, 20)
    x[0, 0, 4, 7], x[0, 0, 9, 3] = np.nan, np.inf
    checked(engine, AvgPool((5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1), True), x)
