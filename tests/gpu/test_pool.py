"""Pooling and its gradients where the other engine has no kernels: other numbers of axes, integers, any address."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from tests.engines.engine import ENGINES
from tests.engines.test_pool import CASES, images, pooled
from tests.gpu.check import check_unaligned, run
from tests.gpu.compiled import needs_gcc
from tests.kernels import as_images, layouts

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]
# shape, then kernel, strides, pads, dilations
OTHER_AXES = {
    "one": ((2, 3, 17), (3,), (2,), ((1, 1),), (2,)),
    "three": ((1, 4, 5, 4, 6), (2, 3, 2), (1, 2, 2), ((1, 0), (1, 1), (0, 0)), (1, 1, 2)),
}


def checked(op: Op, *given: np.ndarray) -> None:
    """In both ways that images lie."""
    ENGINES["cuda"].check_lying(op, *given, ways=layouts(*given))


@pytest.mark.parametrize("axes", OTHER_AXES)
def test_other_numbers_of_axes(axes: str) -> None:
    shape, *geometry = OTHER_AXES[axes]
    x = images(shape, 0)
    checked(MaxPool(*geometry, save_index=True), x)
    _, index = run(MaxPool(*geometry, save_index=True), [x])
    g = images(index.shape, 1)
    checked(MaxPoolGrad(*geometry, shape=shape), index, g)
    for counted in (False, True):
        checked(AvgPool(*geometry, counted), x)
        checked(AvgPoolGrad(*geometry, counted, shape=shape), g)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
@pytest.mark.parametrize("case", ["3x3", "3x3 of 24"])
def test_largest_integers(case: str, dtype: type) -> None:
    shape, *geometry = CASES[case]
    checked(MaxPool(*geometry, save_index=True), np.abs(images(shape, 0)).astype(dtype))


@pytest.mark.parametrize("case", ["3x3 of 24", "overlapping"])
def test_images_that_begin_at_unaligned_elements(case: str) -> None:
    shape, *geometry = CASES[case]
    x, g = images(shape, 0), images(pooled(case), 1)
    _, index = run(MaxPool(*geometry, save_index=True), [x])
    check_unaligned(MaxPool(*geometry, save_index=True), x, windows=as_images(x))
    check_unaligned(MaxPoolGrad(*geometry, shape=shape), index, g, windows=as_images(index, g))
    check_unaligned(AvgPool(*geometry), x, windows=as_images(x))
    check_unaligned(AvgPoolGrad(*geometry, shape=shape), g, windows=as_images(g))


def test_padding_that_is_all_there_is() -> None:
    geometry = ((2, 2), (1, 1), ((1, 1), (1, 1)), (1, 1))
    for shape in ((1, 8, 0, 3), (2, 3, 2, 0)):
        x = np.zeros(shape, np.float32)
        checked(MaxPool(*geometry, save_index=True), x)
        checked(AvgPool(*geometry, True), x)


def test_numbers_of_taps_that_need_two_bytes() -> None:
    x, geometry = images((1, 2, 20, 20), 0), ((17, 17), (2, 2), ((0, 0), (0, 0)), (1, 1))
    checked(MaxPool(*geometry, save_index=True), x)
    _, index = run(MaxPool(*geometry, save_index=True), [x])
    checked(MaxPoolGrad(*geometry, shape=x.shape), index, images(index.shape, 1))
