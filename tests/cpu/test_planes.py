"""Means over windows of images of one channel against the NumPy kernels, whichever axis lies side by side."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Builder, Graph, Op, TensorType, Window, as_dtype
from foreplan.graph.types import FLOAT32
from foreplan.lower import lower
from foreplan.lower.fallbacks import fallbacks
from foreplan.ops.pool import AvgPool, AvgPoolGrad, lrn
from foreplan.ops.window import Pads, count_positions
from foreplan.runtime.cpu.table import family_of
from tests.cpu.check import check, needs_onednn, type_of
from tests.cpu.narrow import check_narrow, narrow

pytestmark = needs_onednn()
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


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


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


def checked(op: Op, given: np.ndarray) -> None:
    for window in (Window.dense(type_of(given)), turned(given), wider(given)):
        check(op, given, windows=[window])


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("shape", "geometry"), CASES)
def test_means(shape: tuple[int, ...], geometry: Geometry, counted: bool) -> None:
    positions = count_positions(shape[2:], *geometry)
    checked(AvgPool(*geometry, counted), numbers(shape, 1))
    checked(AvgPoolGrad(*geometry, counted, shape=shape), numbers((*shape[:2], *positions), 2))


@pytest.mark.parametrize(("shape", "geometry"), CASES)
def test_means_of_bfloat16(shape: tuple[int, ...], geometry: Geometry) -> None:
    x = narrow(numbers(shape, 4))
    g = narrow(numbers((*shape[:2], *count_positions(shape[2:], *geometry)), 5))
    for lie in (lambda x: Window.dense(type_of(x)), turned):
        check_narrow(AvgPool(*geometry), x, windows=[lie(x)])
        check_narrow(AvgPoolGrad(*geometry, shape=shape), g, windows=[lie(g)])


def test_nan_stays_within_its_windows() -> None:
    x = numbers((1, 1, 12, 20), 3)
    x[0, 0, 4, 7], x[0, 0, 9, 3] = np.nan, np.inf
    checked(AvgPool((5, 1), (1, 1), ((2, 2), (0, 0)), (1, 1), True), x)


def normalised(shape: tuple[int, ...]) -> Graph:
    """Local response normalisation behind a convolution, whose channels lie side by side."""
    from foreplan.ops.conv.ops import conv

    b = Builder("g")
    x = b.input("x", TensorType(FLOAT32, shape))
    w = b.input("w", TensorType(FLOAT32, (shape[1], shape[1], 1, 1)))
    return b.finish({"y": lrn(b, conv(b, x, w), 5)})


def test_normalisation_over_channels_falls_back_nowhere_and_takes_channels_as_they_lie() -> None:
    program = lower(normalised((2, 24, 10, 10)), "cpu:threads=1")
    assert not fallbacks(program)
    (call,) = (call for call in program.calls if call.op.name == "avg_pool")
    assert call.inputs[0].window.strides[2] == call.outputs[0].window.strides[2] == FLOAT32.itemsize


def test_other_elements_have_no_kernel() -> None:
    x = TensorType(as_dtype("float64"), (1, 1, 5, 5))
    op = AvgPool((2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1))
    assert family_of(op, [x], op.infer([x]), 1) is None
