"""oneDNN's products and convolutions against NumPy's, over shapes, strides, groups and dilations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import FLOAT32
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.matmul import MatMul
from foreplan.runtime.cpu.table import family_of
from tests.cpu.check import THREADS, check, needs_onednn, run, type_of, ways

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (64, 33, 17), (1, 40, 9), (40, 1, 9)])
def test_products(sizes: tuple[int, int, int], transpose_a: bool, transpose_b: bool) -> None:
    m, n, k = sizes
    a = normal(k, m) if transpose_a else normal(m, k)
    b = normal(n, k) if transpose_b else normal(k, n)
    op = MatMul(transpose_a, transpose_b)
    check(op, a, b)
    check(op, a, b, normal(m, n))
    check(op, a, b, normal(m, n), over=(0, 2))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("columns", [1536, 3072])
def test_matrices_that_are_copied_a_panel_at_a_time(columns: int, transpose_a: bool) -> None:
    """Rows a multiple of 2 KiB apart; the whole matrix, or a range of its columns."""
    a, b = normal(70, 64) if transpose_a else normal(64, 70), normal(70, columns)
    op, y = MatMul(transpose_a), normal(64, columns)
    check(op, a, b)
    check(op, a, b, y)
    check(op, a, b, y, over=(0, 2))
    some = np.ascontiguousarray(b[:, :1000])
    windows = [Window.dense(type_of(a)), Window(type_of(some), (columns * 4, 4))]
    check(op, a, some, windows=windows)
    if not transpose_a:
        check(op, a.reshape(2, 32, 70), b)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 4, 5), (2, 3, 5, 6)),
        ((4, 7, 5), (5, 6)),
        ((4, 7, 5), (1, 5, 6)),
        ((1, 4, 5), (3, 5, 2)),
        ((4, 5), (3, 5, 2)),
    ],
)
def test_batches_of_products(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (normal(*shape) for shape in shapes)
    check(MatMul(), a, b)
    check(MatMul(), a, b, np.matmul(a, b), over=(0, 2))


@pytest.mark.parametrize("repeated", [(0,), (1,), (0, 1)])
def test_one_matrix_repeated_by_its_strides(repeated: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape, np.float32) for shape in ((3, 4, 5), (3, 5, 6))]
    windows = [Window.dense(type_of(x)) for x in inputs]
    for i in repeated:
        inputs[i][:] = inputs[i][:1]
        windows[i] = windows[i].viewed(inputs[i].shape, (0, *windows[i].strides[1:]))
    check(MatMul(), *inputs, windows=windows)


def test_heads_side_by_side() -> None:
    """[batch, heads, rows, width], where the heads of a row lie side by side."""
    a, b = normal(2, 3, 8, 4), normal(2, 3, 8, 4)
    window = Window(TensorType(FLOAT32, a.shape), (8 * 12 * 4, 4 * 4, 12 * 4, 4))
    check(MatMul(False, True), a, b, windows=[window, window])


CASES = [
    # batch, channels, extent, results, taps, stride, pads, dilation, groups
    (2, 3, (9, 8), 16, (3, 3), 1, 1, 1, 1),
    (1, 16, (7, 7), 32, (1, 1), 1, 0, 1, 1),
    (3, 32, (8, 8), 16, (1, 1), 2, 0, 1, 1),
    (1, 16, (24, 23), 32, (1, 1), 1, 0, 1, 1),
    (3, 16, (30, 29), 16, (1, 1), 2, 0, 1, 1),
    (3, 32, (9, 9), 16, (1, 1), 2, 0, 1, 1),
    (2, 8, (11, 10), 12, (3, 2), 2, 1, 1, 1),
    (2, 6, (12, 12), 9, (3, 3), 1, 2, 2, 3),
    (2, 24, (8, 8), 24, (3, 3), 1, 1, 1, 24),
    (1, 1, (8, 8), 20, (3, 3), 1, 1, 1, 1),
    (5, 20, (6, 5), 1, (3, 3), 1, 1, 1, 1),
    (1, 24, (7, 7), 90, (3, 3), 1, 1, 1, 1),
    (2, 19, (9, 8), 64, (3, 2), 2, 1, 2, 1),
    (2, 5, (16,), 7, (3,), 2, 1, 1, 1),
    (1, 4, (5, 6, 5), 6, (2, 3, 2), 1, 1, 1, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolutions_and_their_gradients(case: tuple) -> None:  # type: ignore[type-arg]
    batch, channels, extent, results, taps, stride, pad, dilation, groups = case
    axes = len(extent)
    geometry = ((stride,) * axes, ((pad, pad),) * axes, (dilation,) * axes, groups)
    x, w = normal(batch, channels, *extent), normal(results, channels // groups, *taps)
    conv = Conv(*geometry)
    (y,) = conv.infer([TensorType(FLOAT32, x.shape), TensorType(FLOAT32, w.shape)])
    g = normal(*y.shape)
    options = {"rtol": 1e-4, "atol": 1e-4}
    check(conv, x, w, **options)
    check(conv, x, w, normal(results), **options)
    check(conv, x, w, normal(*y.shape), **options)
    check(conv, x, w, normal(*y.shape), **options)
    data = ConvDataGrad(*geometry, spatial=extent)
    check(data, g, w, **options)
    check(data, g, w, normal(*x.shape), **options)
    weight = ConvWeightGrad(*geometry, kernel=taps)
    check(weight, x, g, **options)
    check(weight, x, g, normal(*w.shape), **options)


MAPS = {  # what is done to a result, and whether each further input is whole
    "relu(a0)": [],
    "relu(((((a0 - a1) * a2) + a3) + a4))": [False, False, False, True],
    "((a0 + a1) * a2)": [True, False],
}
MAP_CASES = [
    # batch, channels, extent, results, taps, stride: a product, a convolution of one tap, others, of few positions, and
    # by Winograd
    (2, 32, (8, 8), 16, 1, 1),
    (3, 32, (9, 8), 16, 1, 2),
    (3, 16, (24, 23), 24, 1, 1),
    (2, 16, (12, 11), 20, 3, 2),
    (1, 3, (20, 20), 8, 5, 1),
    (2, 20, (6, 5), 100, 3, 1),
    (1, 64, (56, 56), 64, 3, 1),
]

# oneDNN may have nothing but a loop over single numbers for both together: then they stay two.
MAY_BE_APART = MAP_CASES[4], "relu(((((a0 - a1) * a2) + a3) + a4))"


def stays_apart(op: ConvMap, inputs: Sequence[np.ndarray]) -> bool:
    """Whether no kernel has a convolution with its map here; both by themselves have one."""
    types = [type_of(x) for x in inputs]
    if family_of(op, types, op.infer(types), THREADS) is not None:
        return False
    (own,) = op.conv.infer(types[: op.own])
    assert family_of(op.conv, types[: op.own], [own], THREADS) is not None
    return True


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("expr", MAPS)
@pytest.mark.parametrize("case", MAP_CASES, ids=str)
def test_convolutions_with_maps_of_their_results(case: tuple, expr: str, biased: bool) -> None:  # type: ignore[type-arg]
    batch, channels, extent, results, taps, stride = case
    pad = taps // 2
    op = ConvMap((stride,) * 2, ((pad, pad),) * 2, (1, 1), 1, expr, biased)
    own = [normal(batch, channels, *extent), normal(results, channels, taps, taps), *[normal(results)] * biased]
    (y,) = op.conv.infer([type_of(x) for x in own])
    further = [normal(*y.shape) if whole else normal(results, 1, 1) for whole in MAPS[expr]]
    if (case, expr) == MAY_BE_APART and stays_apart(op, [*own, *further]):
        return
    check(op, *own, *further, rtol=1e-3, atol=1e-3)
    if True in MAPS[expr]:
        windows = [channels_last(type_of(x)) if x.ndim == 4 else Window.dense(type_of(x)) for x in (*own, *further)]
        windows[1] = Window.dense(type_of(own[1]))
        over = (0, len(own) + MAPS[expr].index(True))
        check(op, *own, *further, windows=windows, over=over, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", MAP_CASES, ids=str)
def test_relu_after_a_convolution_keeps_nan(case: tuple) -> None:  # type: ignore[type-arg]
    batch, channels, extent, results, taps, stride = case
    x, w = normal(batch, channels, *extent), normal(results, channels, taps, taps)
    x[0, 0, 0, 0] = np.nan
    op = ConvMap((stride,) * 2, ((taps // 2, taps // 2),) * 2, (1, 1), 1, "relu(a0)")
    (y,) = run(op, [x, w])
    assert np.isnan(y[0, :, 0, 0]).all() and not np.isnan(y[0, :, -1, -1]).any()


def test_few_positions_of_several_taps_are_gathered_for_a_product() -> None:
    op, x, w = Conv((2, 2), ((1, 1), (1, 1)), (1, 1), 1), normal(1, 30, 14, 14), normal(96, 30, 3, 3)
    last = Window(type_of(x), (14 * 14 * 160, 4, 14 * 160, 160))  # of 40 channels
    windows = [last, Window.dense(type_of(w))]
    assert "columns" in ways(op, [x, w], windows)
    check(op, x, w, windows=windows, rtol=1e-4, atol=1e-4)
    assert "columns" not in ways(op, [x, w[:49]])  # weights are as few as what is gathered
    program = fp.compile(fp.models.build("resnet18:batch=1"), target="cpu:threads=1").program
    chosen = [
        call.op.infer([x.type for x in call.inputs])[0].shape for call in program.calls if call.kernel == "columns"
    ]
    assert chosen == [(1, 512, 7, 7)] * 4


def test_what_is_added_to_may_be_changed_in_place() -> None:
    x, w = normal(4, 16, 6, 6), normal(16, 16, 3, 3)
    geometry = ((1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    last = Window(TensorType(FLOAT32, x.shape), (6 * 6 * 16 * 4, 4, 6 * 16 * 4, 16 * 4))
    plain = Window.dense(TensorType(FLOAT32, w.shape))
    check(Conv(*geometry), x, w, normal(*x.shape), windows=[last, plain, last], over=(0, 2), rtol=1e-4, atol=1e-4)
    data = ConvDataGrad(*geometry, spatial=(6, 6))
    check(data, x, w, normal(*x.shape), windows=[last, plain, last], over=(0, 2), rtol=1e-4, atol=1e-4)


def test_a_range_of_channels_of_images_and_of_weights() -> None:
    x, w = normal(2, 16, 6, 6), normal(8, 16, 3, 3)
    image = Window(TensorType(FLOAT32, x.shape), (6 * 6 * 48 * 4, 4, 6 * 48 * 4, 48 * 4))
    columns = Window(TensorType(FLOAT32, w.shape), (40 * 9 * 4, 9 * 4, 3 * 4, 4))
    geometry = ((1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    check(Conv(*geometry), x, w, windows=[image, columns], rtol=1e-4, atol=1e-4)


def test_patches_whose_cotangent_has_gaps_between_images() -> None:
    """As where a token of another kind stands before those of the patches."""
    x, g = normal(2, 3, 16, 16), normal(2, 20, 4, 4)
    last = Window(type_of(x), (16 * 16 * 3 * 4, 4, 16 * 3 * 4, 3 * 4))
    apart = Window(type_of(g), (17 * 20 * 4, 4, 4 * 20 * 4, 20 * 4))
    op = ConvWeightGrad((4, 4), ((0, 0), (0, 0)), (1, 1), 1, kernel=(4, 4))
    check(op, x, g, windows=[last, apart], rtol=1e-4, atol=1e-4)
