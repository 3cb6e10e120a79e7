"""Convolutions of one input channel a group, and their gradients: the kernels of their own, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import Op, TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.window import count_positions
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.kernels import depthwise, prices
from foreplan.runtime.cuda.launch import Launch
from tests.engines.engine import ENGINES, NARROW
from tests.engines.test_convolution import NEAR, gradients, lying
from tests.gpu.check import check, check_unaligned, made, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal
from tests.profile import pick

OWN_FILES = ("depthwise.cu", "depthwise_weights.cu")


def files(op: Op, *given: np.ndarray) -> set[str]:
    """The files whose kernels an op launches."""
    launches = made(op, [type_of(x) for x in given])[0].instructions
    return {each.source.file for each in launches if isinstance(each, Launch)}


def drawn(rng: np.random.Generator) -> tuple[Conv, np.ndarray, np.ndarray, np.ndarray]:
    """A convolution with any geometry, images, weights, and the gradient of the result."""
    while True:
        axes = int(rng.choice([1, 2, 2, 2, 3]))
        shape = tuple(int(n) for n in rng.integers(1, (40, 14, 6)[axes - 1], axes))
        kernel = tuple(int(n) for n in rng.integers(1, (12, 6, 4)[axes - 1], axes))
        strides, dilations = (tuple(int(n) for n in rng.integers(1, most, axes)) for most in (5, 4))
        pads = tuple((int(low), int(high)) for low, high in rng.integers(-1, 4, (axes, 2)))
        try:
            positions = count_positions(shape, kernel, strides, pads, dilations)
        except ShapeError:
            continue
        break
    channels, filters = int(rng.choice([1, 2, 3, 5, 8, 12, 70])), int(rng.choice([1, 1, 1, 2, 3]))
    op = Conv(strides, pads, dilations, channels)
    x, w = normal(int(rng.integers(1, 4)), channels, *shape), normal(channels * filters, 1, *kernel, seed=1)
    return op, x, w, normal(len(x), len(w), *positions, seed=2)


@needs_gcc
@pytest.mark.parametrize("number", range(pick(8, 16, 200)))
def test_drawn_geometries(number: int) -> None:
    """With a bias, a summand or neither, each type in turn."""
    rng = np.random.default_rng(number)
    conv, x, w, g = drawn(rng)
    engine, last = (ENGINES if number % 2 else NARROW)["cuda"], bool(rng.integers(2))
    data, weight = gradients(conv, x, w, wide=engine.narrow and bool(rng.integers(2)))
    added = [[], [normal(len(w), seed=3)], [normal(*g.shape, seed=3)]][number % 3]
    more = number % 3 > 0
    for op, *given in (
        (conv, x, w, *added),
        (data, g, w, *[normal(*x.shape, seed=4)] * more),
        (weight, x, g, *[normal(*w.shape, seed=4)] * more),
    ):
        engine.check(op, *given, windows=lying(last, w, *given), **NEAR)


@needs_gcc
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_types(dtype: type) -> None:
    conv = Conv((2, 1), ((1, 0), (2, 1)), (1, 2), 8)
    x, w = normal(2, 8, 9, 10).astype(dtype), normal(8, 1, 3, 3).astype(dtype)
    g = normal(*conv.infer([type_of(x), type_of(w)])[0].shape).astype(dtype)
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == np.float64 else {"rtol": 1e-3, "atol": 1e-3}
    for last in (True, False):
        for op, *given in zip((conv, *gradients(conv, x, w)), (x, g, x), (w, w, g)):
            assert files(op, *given) <= {*OWN_FILES}
            check(op, *given, windows=lying(last, w, *given), **near)


@needs_gcc
def test_a_summand_is_changed_in_place() -> None:
    conv = Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 12)
    x, w, g = normal(2, 12, 7, 6), normal(12, 1, 3, 3), normal(2, 12, 7, 6, seed=1)
    data, weight = gradients(conv, x, w)
    for op, *given in ((conv, x, w, g.copy()), (data, g, w, x), (weight, x, g, w)):
        check(op, *given, windows=lying(True, w, *given), over=(0, 2), **NEAR)


@needs_gcc
def test_operands_that_begin_at_unaligned_elements() -> None:
    conv = Conv((1, 2), ((1, 1), (1, 1)), (1, 1), 12)
    x, w = normal(2, 12, 7, 6), normal(12, 1, 3, 3)
    g = normal(*conv.infer([type_of(x), type_of(w)])[0].shape)
    for op, *given in zip((conv, *gradients(conv, x, w)), (x, g, x), (w, w, g)):
        check_unaligned(op, *given, windows=lying(True, w, *given), **NEAR)


@needs_gcc
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_sums_over_many_positions_are_taken_in_parts(last: bool) -> None:
    weight = ConvWeightGrad((1, 1), ((1, 1), (1, 1)), (1, 1), 6, kernel=(3, 3))
    x, g, w = normal(6, 6, 64, 61), normal(6, 6, 64, 61, seed=1), normal(6, 1, 3, 3)
    given = lying(last, w, x, g)
    kernel, _, _ = made(weight, [type_of(x), type_of(g)], given)
    first, second = kernel.instructions
    assert isinstance(first, Launch) and isinstance(second, Launch)
    assert (first.source.file, second.source.file) == ("depthwise_weights.cu", "reduce.cu")
    assert kernel.workspace == first.grid[1] * w.nbytes
    check(weight, x, g, w, windows=[*given, Window.dense(type_of(w))], over=(0, 2), rtol=1e-4, atol=1e-3)
    for wide in (False, True):
        NARROW["cuda"].check(replace(weight, wide=wide), x, g, windows=given)


@needs_gcc
def test_what_is_infinite_counts_for_windows_on_it_alone() -> None:
    """The last columns of a row belong to no window: a block reads them for a window that is not there."""
    weight = ConvWeightGrad((1, 2), ((0, 0), (0, -4)), (1, 1), 4, kernel=(1, 2))
    x = normal(1, 4, 2, 14)
    x[..., -4:] = np.inf
    check(weight, x, normal(1, 4, 2, 5), **NEAR)


@needs_gcc
def test_convolutions_that_go_by_products() -> None:
    """More than 64 taps, too many columns together, images of padding alone, and two channels a group."""
    for shape, kernel, strides, pad, own in (
        ((1, 4, 9, 9), (9, 8), (1, 1), 0, 1),
        ((1, 4, 3, 70), (1, 40), (1, 1), 0, 1),
        ((1, 4, 0, 3), (1, 1), (1, 1), 1, 1),
        ((1, 4, 5, 5), (3, 3), (1, 1), 1, 2),
    ):
        conv = Conv(strides, ((pad, pad),) * 2, (1, 1), shape[1] // own)
        x, w = np.zeros(shape, np.float32) if not np.prod(shape) else normal(*shape), normal(4, own, *kernel)
        g = normal(*conv.infer([type_of(x), type_of(w)])[0].shape)
        for op, *given in zip((conv, *gradients(conv, x, w)), (x, g, x), (w, w, g)):
            assert not files(op, *given) & {*OWN_FILES}
            check(op, *given, **NEAR)


Case = tuple[Any, ...]  # kind, channels, extent, kernel, stride; and milliseconds
# On an H200, of EfficientNet-B0 at batch 128 in bfloat16, channels last, when these were products: milliseconds.
MEASURED = [
    (ConvWeightGrad, 144, 56, 3, 1, 139.7),
    (ConvWeightGrad, 96, 112, 3, 2, 82.6),
    (ConvWeightGrad, 240, 28, 5, 1, 34.7),
    (ConvWeightGrad, 1152, 7, 5, 1, 3.9),
    (ConvDataGrad, 96, 112, 3, 2, 50.5),
    (ConvDataGrad, 144, 56, 3, 1, 16.8),
    (Conv, 144, 56, 3, 1, 16.8),
    (Conv, 672, 14, 5, 1, 6.5),
]


def price(kind: type, channels: int, extent: int, kernel: int, stride: int) -> float:
    """Milliseconds that foreplan's own kernel is predicted to take."""
    bf16, pads = DTYPES["bfloat16"], ((kernel // 2, kernel // 2),) * 2
    conv = Conv((stride,) * 2, pads, (1, 1), channels)
    x, w = (TensorType(bf16, shape) for shape in ((128, channels, extent, extent), (channels, 1, kernel, kernel)))
    (y,) = conv.infer([x, w])
    op: Op = conv
    given, result = [x, w], y
    if kind is ConvDataGrad:
        op, given, result = ConvDataGrad(*conv.geometry, spatial=x.shape[2:]), [y, w], x
    elif kind is ConvWeightGrad:
        op, given, result = ConvWeightGrad(*conv.geometry, kernel=w.shape[2:]), [x, y], w
    windows = [Window.dense(each) if each == w else channels_last(each) for each in (*given, result)]
    return prices.convolution(op, windows[:2], windows[2:], device_named("h200")) / 1e6


@pytest.mark.parametrize("case", MEASURED)
def test_products_of_groups_cost_what_was_measured(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    *layer, milliseconds = case
    as_depthwise = price(*layer)
    monkeypatch.setattr(depthwise, "serves", lambda *_: False)
    as_products = price(*layer)
    assert milliseconds / 1.6 < as_products < milliseconds * 1.6
    assert as_depthwise < as_products / 5


# What the kernels of their own took there, in milliseconds: shorter ones take up to three times as long as predicted.
OWN_MEASURED = [
    (Conv, 144, 56, 3, 1, 0.132),
    (Conv, 240, 28, 5, 1, 0.146),
    (Conv, 96, 112, 3, 2, 0.142),
    (ConvDataGrad, 144, 56, 3, 1, 0.143),
    (ConvDataGrad, 672, 14, 5, 1, 0.137),
    (ConvDataGrad, 96, 112, 3, 2, 0.178),
    (ConvWeightGrad, 144, 56, 3, 1, 0.156),
    (ConvWeightGrad, 96, 112, 3, 2, 0.280),
    (ConvWeightGrad, 1152, 7, 5, 1, 0.078),
]


@pytest.mark.parametrize("case", OWN_MEASURED)
def test_kernels_of_their_own_cost_what_was_measured(case: Case) -> None:
    *layer, milliseconds = case
    assert milliseconds / 2.1 < price(*layer) < milliseconds * 2.1
