"""Convolutions and their gradients."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from tests.gpu.check import check, made, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)

# items, channels, filters, spatial, kernel, strides, pads, dilations, groups
CASES = {
    "3x3": (2, 5, 7, (9, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    "pointwise": (3, 17, 33, (5, 4), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    "strided": (2, 3, 40, (17, 15), (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1), 1),
    "pointwise strided": (2, 8, 6, (7, 9), (1, 1), (2, 3), ((0, 0), (0, 0)), (1, 1), 1),
    "dilated, pads differ": (1, 4, 3, (11, 12), (3, 2), (1, 2), ((2, 0), (0, 3)), (2, 3), 1),
    "cropped": (2, 3, 4, (9, 9), (3, 3), (1, 1), ((-1, 0), (1, -2)), (1, 1), 1),
    "groups": (2, 12, 6, (6, 5), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 3),
    "depth-wise": (2, 6, 6, (7, 7), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 6),
    "one axis": (2, 4, 5, (19,), (4,), (3,), ((1, 2),), (2,), 1),
    "three axes": (1, 3, 4, (5, 4, 6), (2, 3, 2), (1, 2, 1), ((0, 1), (1, 1), (1, 0)), (1, 1, 2), 1),
}


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ops(case: str) -> tuple[Conv, ConvDataGrad, ConvWeightGrad, np.ndarray, np.ndarray, np.ndarray]:
    n, c, k, spatial, kernel, *geometry = CASES[case]
    conv = Conv(*geometry)
    x, w = f32(n, c, *spatial), f32(k, c // conv.groups, *kernel)
    (y,) = conv.infer([type_of(x), type_of(w)])
    return (
        conv,
        ConvDataGrad(*geometry, spatial=spatial),
        ConvWeightGrad(*geometry, kernel=kernel),
        x,
        w,
        f32(*y.shape),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_geometries(case: str, last: bool) -> None:
    conv, data, weight, x, w, g = ops(case)

    def lying(*arrays: np.ndarray) -> list[Window]:
        return [channels_last(type_of(a)) if last and a is not w else Window.dense(type_of(a)) for a in arrays]

    check(conv, x, w, windows=lying(x, w), atol=1e-4)
    check(data, g, w, windows=lying(g, w), atol=1e-4)
    check(weight, x, g, windows=lying(x, g), atol=1e-4)


def test_what_is_added() -> None:
    conv, data, weight, x, w, g = ops("3x3")
    check(conv, x, w, f32(7), atol=1e-4)
    base = f32(*g.shape)
    images = [channels_last(type_of(a)) for a in (x, w, base)]
    check(conv, x, w, base, windows=images, over=(0, 2), atol=1e-4)
    check(data, g, w, x, windows=[channels_last(type_of(a)) for a in (g, w, x)], over=(0, 2), atol=1e-4)
    check(weight, x, g, w, over=(0, 2), atol=1e-4)
    conv, data, weight, x, w, g = ops("groups")
    check(conv, x, w, f32(6), atol=1e-4)
    check(conv, x, w, g, atol=1e-4)
    check(data, g, w, x, atol=1e-4)
    check(weight, x, g, w, atol=1e-4)


def test_sums_over_many_positions_are_taken_in_parts() -> None:
    weight = ConvWeightGrad((1, 1), ((1, 1), (1, 1)), (1, 1), kernel=(3, 3))
    x, g = f32(2, 3, 40, 40), f32(2, 4, 40, 40)
    kernel, _, _ = made(weight, [type_of(x), type_of(g)])
    assert len(kernel.instructions) == 2
    check(weight, x, g, f32(4, 3, 3, 3), over=(0, 2), rtol=1e-4, atol=1e-3)
    narrow = [a.astype(DTYPES["bfloat16"].numpy) for a in (x, g)]
    check(weight, *narrow, rtol=1e-2, atol=0.1)
    wide = ConvWeightGrad((1, 1), ((1, 1), (1, 1)), (1, 1), kernel=(3, 3), wide=True)
    check(wide, *narrow, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_elements(dtype: str) -> None:
    conv, data, _, x, w, g = ops("3x3")
    x, w, g = (a.astype(DTYPES[dtype].numpy) for a in (x, w, g))
    check(conv, x, w, rtol=2e-2, atol=2e-2)
    check(conv, x, w, f32(7), rtol=2e-2, atol=2e-2)
    check(data, g, w, rtol=2e-2, atol=2e-2)


def test_views_of_channels() -> None:
    conv, _, _, x, w, _ = ops("3x3")
    whole = channels_last(type_of(f32(2, 13, 9, 8)))
    check(conv, x, w, windows=[Window(type_of(x), whole.strides), Window.dense(type_of(w))], atol=1e-4)
