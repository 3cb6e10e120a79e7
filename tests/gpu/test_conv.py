"""Convolutions and their gradients where the engines differ: cropped images, sums in parts."""

from __future__ import annotations

from dataclasses import replace

from foreplan.ops.conv.ops import Conv, ConvWeightGrad
from tests.engines.engine import NARROW
from tests.engines.test_convolution import NEAR, gradients, lying
from tests.gpu.check import check, made, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = needs_gcc


def test_images_that_are_cropped() -> None:
    """Which NumPy's kernel runs on the target `cpu`."""
    conv, x, w = Conv((1, 1), ((-1, 0), (1, -2)), (1, 1)), normal(2, 3, 9, 9), normal(4, 3, 3, 3)
    g = normal(*conv.infer([type_of(x), type_of(w)])[0].shape)
    for last in (True, False):
        for op, *given in zip((conv, *gradients(conv, x, w)), (x, g, x), (w, w, g)):
            check(op, *given, windows=lying(last, w, *given), **NEAR)


def test_sums_over_many_positions_are_taken_in_parts() -> None:
    weight = ConvWeightGrad((1, 1), ((1, 1), (1, 1)), (1, 1), kernel=(3, 3))
    x, g = normal(2, 3, 40, 40), normal(2, 4, 40, 40)
    kernel, _, _ = made(weight, [type_of(x), type_of(g)])
    assert len(kernel.instructions) == 2
    check(weight, x, g, normal(4, 3, 3, 3), over=(0, 2), rtol=1e-4, atol=1e-3)
    for wide in (False, True):
        NARROW["cuda"].check(replace(weight, wide=wide), x, g)
