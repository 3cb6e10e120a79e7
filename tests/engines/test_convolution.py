"""Convolutions and their gradients: geometry of every kind, added to something or not, images however they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from tests.engines.engine import Engine
from tests.kernels import normal
from tests.ops.check import type_of

NEAR = {"rtol": 1e-4, "atol": 1e-4}
NONE, ONE = ((0, 0), (0, 0)), ((1, 1), (1, 1))
# Shape of images, filters, kernel, then strides, pads, dilations and groups.
CASES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], tuple[Any, ...]]] = {
    "3x3": ((2, 5, 9, 8), 7, (3, 3), ((1, 1), ONE, (1, 1), 1)),
    "3x3 of 3": ((2, 3, 9, 8), 16, (3, 3), ((1, 1), ONE, (1, 1), 1)),
    "3x3 of 1": ((1, 1, 8, 8), 20, (3, 3), ((1, 1), ONE, (1, 1), 1)),
    "3x3 to 1": ((5, 20, 6, 5), 1, (3, 3), ((1, 1), ONE, (1, 1), 1)),
    "3x3 of 24": ((1, 24, 7, 7), 90, (3, 3), ((1, 1), ONE, (1, 1), 1)),
    "pointwise": ((3, 17, 5, 4), 33, (1, 1), ((1, 1), NONE, (1, 1), 1)),
    "pointwise of 16": ((1, 16, 7, 7), 32, (1, 1), ((1, 1), NONE, (1, 1), 1)),
    "pointwise of large images": ((1, 16, 24, 23), 32, (1, 1), ((1, 1), NONE, (1, 1), 1)),
    "pointwise strided": ((2, 8, 7, 9), 6, (1, 1), ((2, 3), NONE, (1, 1), 1)),
    "pointwise strided of 32": ((3, 32, 8, 8), 16, (1, 1), ((2, 2), NONE, (1, 1), 1)),
    "pointwise strided, odd": ((3, 32, 9, 9), 16, (1, 1), ((2, 2), NONE, (1, 1), 1)),
    "pointwise strided of large images": ((3, 16, 30, 29), 16, (1, 1), ((2, 2), NONE, (1, 1), 1)),
    "7x7 strided": ((2, 3, 17, 15), 40, (7, 7), ((2, 2), ((3, 3), (3, 3)), (1, 1), 1)),
    "3x2 strided": ((2, 8, 11, 10), 12, (3, 2), ((2, 2), ONE, (1, 1), 1)),
    "dilated, pads differ": ((1, 4, 11, 12), 3, (3, 2), ((1, 2), ((2, 0), (0, 3)), (2, 3), 1)),
    "dilated, strided": ((2, 19, 9, 8), 64, (3, 2), ((2, 2), ONE, (2, 2), 1)),
    "groups": ((2, 12, 6, 5), 6, (3, 3), ((1, 1), ONE, (1, 1), 3)),
    "groups, dilated": ((2, 6, 12, 12), 9, (3, 3), ((1, 1), ((2, 2), (2, 2)), (2, 2), 3)),
    "depth-wise": ((2, 24, 8, 8), 24, (3, 3), ((1, 1), ONE, (1, 1), 24)),
    "depth-wise strided": ((2, 6, 7, 7), 6, (3, 3), ((2, 2), ONE, (1, 1), 6)),
    "patches": ((2, 3, 16, 16), 20, (4, 4), ((4, 4), NONE, (1, 1), 1)),
    "one axis": ((2, 4, 19), 5, (4,), ((3,), ((1, 2),), (2,), 1)),
    "one axis strided": ((2, 5, 16), 7, (3,), ((2,), ((1, 1),), (1,), 1)),
    "three axes": ((1, 3, 5, 4, 6), 4, (2, 3, 2), ((1, 2, 1), ((0, 1), (1, 1), (1, 0)), (1, 1, 2), 1)),
    "three axes, groups": ((1, 4, 5, 6, 5), 6, (2, 3, 2), ((1, 1, 1), ((1, 1),) * 3, (1, 1, 1), 2)),
}
# What "same" means where a stride of 2 halves an even extent: zeros before, on both sides, or behind.
for axes in (1, 2, 3):
    for low in (0, 1, 2):
        geometry = (2,) * axes, ((low, 2 - low),) * axes, (1,) * axes
        CASES[f"{axes} axes, {low} before"] = (2, 4, *[8] * axes), 6, (3,) * axes, geometry


def operands(case: str) -> tuple[Conv, np.ndarray, np.ndarray, np.ndarray]:
    """A convolution, images, weights, and the gradient of the result."""
    shape, filters, kernel, geometry = CASES[case]
    op = Conv(*geometry)
    x, w = normal(*shape), normal(filters, shape[1] // op.groups, *kernel)
    return op, x, w, normal(*op.infer([type_of(x), type_of(w)])[0].shape, seed=1)


def gradients(op: Conv, x: np.ndarray, w: np.ndarray, wide: bool = False) -> tuple[ConvDataGrad, ConvWeightGrad]:
    data = ConvDataGrad(*op.geometry, spatial=x.shape[2:])
    return data, ConvWeightGrad(*op.geometry, kernel=w.shape[2:], wide=wide)


def lying(last: bool, w: np.ndarray, *given: np.ndarray) -> list[Window]:
    """Images with their channels last or in C order; weights, or what is as large, and vectors in C order."""
    images = [last and x.ndim > 2 and x.shape != w.shape for x in given]
    return [(channels_last if image else Window.dense)(type_of(x)) for x, image in zip(given, images)]


@pytest.mark.bfloat16
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("case", CASES)
def test_geometries(engine: Engine, case: str, last: bool) -> None:
    """Alone with channels last; with a bias, and added to something, in C order."""
    conv, x, w, g = operands(case)

    def checked(op: Op, *given: np.ndarray) -> None:
        engine.check(op, *given, windows=lying(last, w, *given), **NEAR)

    data, weight = gradients(conv, x, w)
    checked(conv, x, w, *[normal(len(w))] * (not last))
    if last:
        checked(data, g, w)
        checked(weight, x, g)
        return
    checked(conv, x, w, normal(*g.shape, seed=2))
    checked(data, g, w, normal(*x.shape, seed=2))
    weight = gradients(conv, x, w, wide=engine.narrow)[1]
    checked(weight, x, g)
    checked(weight, x, g, normal(*w.shape, seed=2))


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", ["3x3", "3x3 of 24", "pointwise of 16", "groups"])
def test_what_is_added_to_may_be_changed_in_place(engine: Engine, case: str) -> None:
    conv, x, w, g = operands(case)
    (data, _), (_, weight) = gradients(conv, x, w), gradients(conv, x, w, wide=True)
    for op, *given in ((conv, x, w, g.copy()), (data, g, w, x), (weight, x, g, w)):
        engine.check(op, *given, windows=lying(True, w, *given), over=(0, 2), **NEAR)


@pytest.mark.bfloat16
def test_a_range_of_channels_of_images_and_of_weights(engine: Engine) -> None:
    conv, x, w, _ = operands("3x3")
    whole = channels_last(type_of(normal(2, 13, 9, 8)))
    wide, plain = Window(type_of(x), whole.strides), Window.dense(type_of(w))
    columns = Window(type_of(w), (40 * 9 * 4, 9 * 4, 3 * 4, 4))
    for windows in ([wide, plain], [wide, columns]):
        engine.check(conv, x, w, windows=windows, **NEAR)


@pytest.mark.bfloat16
def test_patches_whose_cotangent_has_gaps_between_images(engine: Engine) -> None:
    """As where a token of another kind stands before those of the patches."""
    conv, x, w, g = operands("patches")
    apart = Window(type_of(g), (17 * 20 * 4, 4, 4 * 20 * 4, 20 * 4))
    engine.check(gradients(conv, x, w)[1], x, g, windows=[channels_last(type_of(x)), apart], **NEAR)
