"""Pooling and its gradients where the other engine has no kernels: other numbers of axes, other types, any address."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.window import count_positions
from tests.gpu.check import check, check_unaligned, run, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import as_images

pytestmark = needs_gcc
# shape, then kernel, strides, pads, dilations
CASES = {
    "3x3": ((2, 19, 8, 7), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    "overlapping": ((3, 16, 5, 5), (5, 5), (1, 1), ((2, 2), (2, 2)), (1, 1)),
    "3x3 of 24": ((2, 24, 9, 8), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    "one axis": ((2, 3, 17), (3,), (2,), ((1, 1),), (2,)),
    "three axes": ((1, 4, 5, 4, 6), (2, 3, 2), (1, 2, 2), ((1, 0), (1, 1), (0, 0)), (1, 1, 2)),
}


def images(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)  # with ties


def pooled(case: str) -> tuple[int, ...]:
    shape, *geometry = CASES[case]
    return (*shape[:2], *count_positions(shape[2:], *geometry))


def checked(op: Op, *given: np.ndarray) -> None:
    """In both ways that images lie."""
    for lie in (channels_last, Window.dense):
        check(op, *given, windows=[lie(type_of(x)) for x in given])


@pytest.mark.parametrize("case", ["one axis", "three axes"])
def test_other_numbers_of_axes(case: str) -> None:
    shape, *geometry = CASES[case]
    x, g = images(shape, 0), images(pooled(case), 1)
    checked(MaxPool(*geometry, save_index=True), x)
    _, index = run(MaxPool(*geometry, save_index=True), [x])
    checked(MaxPoolGrad(*geometry, shape=shape), index, g)
    for counted in (False, True):
        checked(AvgPool(*geometry, counted), x)
        checked(AvgPoolGrad(*geometry, counted, shape=shape), g)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32", "uint8"])
@pytest.mark.parametrize("case", ["3x3", "3x3 of 24"])
def test_other_types(case: str, dtype: str) -> None:
    shape, *geometry = CASES[case]
    x = np.abs(images(shape, 0)).astype(DTYPES[dtype].numpy)
    checked(MaxPool(*geometry, save_index=True), x)
    if DTYPES[dtype].is_float:
        narrow = {"bfloat16": 2e-2, "float16": 2e-3}.get(dtype, 1e-12)
        check(AvgPool(*geometry), x, rtol=narrow, atol=narrow)
        _, index = run(MaxPool(*geometry, save_index=True), [x])
        given = index, x[..., : index.shape[2], : index.shape[3]].copy()
        windows = [channels_last(type_of(each)) for each in given]
        check(MaxPoolGrad(*geometry, shape=shape), *given, rtol=narrow, atol=narrow, windows=windows)


@pytest.mark.parametrize("case", ["3x3 of 24", "overlapping"])
def test_images_that_begin_at_unaligned_elements(case: str) -> None:
    shape, *geometry = CASES[case]
    x, g = images(shape, 0), images(pooled(case), 1)
    _, index = run(MaxPool(*geometry, save_index=True), [x])
    check_unaligned(MaxPool(*geometry, save_index=True), x, windows=as_images(x))
    check_unaligned(MaxPoolGrad(*geometry, shape=shape), index, g, windows=as_images(index, g))
    check_unaligned(AvgPool(*geometry), x, windows=as_images(x))
    check_unaligned(AvgPoolGrad(*geometry, shape=shape), g, windows=as_images(g))


@pytest.mark.parametrize("more", [0, 3, 8])
def test_channels_of_wider_images(more: int) -> None:
    shape, *geometry = CASES["3x3 of 24"]
    x, wide = images(shape, 0), 4 * (24 + more)
    window = Window(type_of(x), (72 * wide, 4, 8 * wide, wide))
    check(MaxPool(*geometry, save_index=True), x, windows=[window])
    check(AvgPool(*geometry), x, windows=[window])


def test_padding_that_is_all_there_is() -> None:
    geometry = ((2, 2), (1, 1), ((1, 1), (1, 1)), (1, 1))
    for shape in ((1, 8, 0, 3), (2, 3, 2, 0)):
        x = np.zeros(shape, np.float32)
        checked(MaxPool(*geometry, save_index=True), x)
        checked(AvgPool(*geometry, True), x)


def test_numbers_of_taps_that_need_two_bytes() -> None:
    x = images((1, 2, 20, 20), 0)
    geometry = ((17, 17), (2, 2), ((0, 0), (0, 0)), (1, 1))
    checked(MaxPool(*geometry, save_index=True), x)
    _, index = run(MaxPool(*geometry, save_index=True), [x])
    checked(MaxPoolGrad(*geometry, shape=x.shape), index, images(index.shape, 1))
