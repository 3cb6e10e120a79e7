"""oneDNN's products and convolutions of bfloat16: what float32 gives on the same numbers, rounded once or twice."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.matmul import MatMul
from tests.cpu.check import needs_onednn, run, type_of
from tests.cpu.narrow import check_narrow, narrow
from tests.cpu.test_contraction import CASES, MAP_CASES, MAPS, MAY_BE_APART, stays_apart

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)
ADDED = {"ulps": 1.0, "exact": 2.0**-8}  # the product is rounded before what is added, and may cancel


def wide(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def normal(*shape: int) -> np.ndarray:
    return narrow(wide(*shape))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (64, 33, 17), (1, 40, 9), (40, 1, 9), (128, 3072, 70)])
def test_products(sizes: tuple[int, int, int], transpose_a: bool, transpose_b: bool) -> None:
    m, n, k = sizes
    a = normal(k, m) if transpose_a else normal(m, k)
    b = normal(n, k) if transpose_b else normal(k, n)
    op = MatMul(transpose_a, transpose_b)
    check_narrow(op, a, b)
    check_narrow(op, a, b, normal(m, n), **ADDED)
    check_narrow(op, a, b, normal(m, n), over=(0, 2), **ADDED)
    wide_op = MatMul(transpose_a, transpose_b, wide=True)
    check_narrow(wide_op, a, b)
    check_narrow(wide_op, a, b, wide(m, n))
    check_narrow(wide_op, a, b, wide(m, n), over=(0, 2))


@pytest.mark.parametrize("shapes", [((2, 3, 4, 5), (2, 3, 5, 6)), ((4, 7, 5), (5, 6)), ((1, 4, 5), (3, 5, 2))])
def test_batches_of_products(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check_narrow(MatMul(), *(normal(*shape) for shape in shapes))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolutions_and_their_gradients(case: tuple) -> None:  # type: ignore[type-arg]
    batch, channels, extent, results, taps, stride, pad, dilation, groups = case
    axes = len(extent)
    geometry = ((stride,) * axes, ((pad, pad),) * axes, (dilation,) * axes, groups)
    x, w = normal(batch, channels, *extent), normal(results, channels // groups, *taps)
    conv = Conv(*geometry)
    (y,) = conv.infer([type_of(x), type_of(w)])
    g = normal(*y.shape)
    check_narrow(conv, x, w)
    check_narrow(conv, x, w, wide(results))
    check_narrow(conv, x, w, normal(*y.shape), **ADDED)
    data = ConvDataGrad(*geometry, spatial=extent)
    check_narrow(data, g, w)
    check_narrow(data, g, w, normal(*x.shape), **ADDED)
    weight = ConvWeightGrad(*geometry, kernel=taps)
    check_narrow(weight, x, g)
    weight = ConvWeightGrad(*geometry, kernel=taps, wide=True)
    check_narrow(weight, x, g)
    check_narrow(weight, x, g, wide(*w.shape))


def test_what_is_added_to_may_be_changed_in_place() -> None:
    x, w = normal(4, 16, 6, 6), normal(16, 16, 3, 3)
    geometry = ((1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    windows = [channels_last(type_of(x)), Window.dense(type_of(w)), channels_last(type_of(x))]
    check_narrow(Conv(*geometry), x, w, normal(*x.shape), windows=windows, over=(0, 2), **ADDED)
    data = ConvDataGrad(*geometry, spatial=(6, 6))
    check_narrow(data, x, w, normal(*x.shape), windows=windows, over=(0, 2), **ADDED)


def test_a_range_of_channels_of_images_and_of_weights() -> None:
    x, w = normal(2, 16, 6, 6), normal(8, 16, 3, 3)
    image = Window(type_of(x), (6 * 6 * 48 * 2, 2, 6 * 48 * 2, 48 * 2))
    columns = Window(type_of(w), (40 * 9 * 2, 9 * 2, 3 * 2, 2))
    check_narrow(Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 1), x, w, windows=[image, columns])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("expr", MAPS)
@pytest.mark.parametrize("case", MAP_CASES, ids=str)
def test_convolutions_with_maps_of_their_results(case: tuple, expr: str, biased: bool) -> None:  # type: ignore[type-arg]
    """Vectors are of float32."""
    batch, channels, extent, results, taps, stride = case
    pad = taps // 2
    op = ConvMap((stride,) * 2, ((pad, pad),) * 2, (1, 1), 1, expr, biased)
    x, w = normal(batch, channels, *extent), normal(results, channels, taps, taps)
    own = [x, w, *[wide(results)] * biased]
    (y,) = op.conv.infer([type_of(array) for array in own])
    further = [normal(*y.shape) if whole else wide(results, 1, 1) for whole in MAPS[expr]]
    if (case, expr) == MAY_BE_APART and stays_apart(op, [*own, *further]):
        return
    check_narrow(op, *own, *further, **ADDED)
    if True in MAPS[expr]:
        windows = [channels_last(type_of(a)) if a.ndim == 4 else Window.dense(type_of(a)) for a in (*own, *further)]
        windows[1] = Window.dense(type_of(w))
        over = (0, len(own) + MAPS[expr].index(True))
        check_narrow(op, *own, *further, windows=windows, over=over, **ADDED)


@pytest.mark.parametrize("case", MAP_CASES, ids=str)
def test_relu_after_a_convolution_keeps_nan(case: tuple) -> None:  # type: ignore[type-arg]
    batch, channels, extent, results, taps, stride = case
    x, w = normal(batch, channels, *extent), normal(results, channels, taps, taps)
    x[0, 0, 0, 0] = np.nan
    op = ConvMap((stride,) * 2, ((taps // 2, taps // 2),) * 2, (1, 1), 1, "relu(a0)")
    (y,) = run(op, [x, w])
    assert np.isnan(y[0, :, 0, 0]).all() and not np.isnan(y[0, :, -1, -1]).any()
