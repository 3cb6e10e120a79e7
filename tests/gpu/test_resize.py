"""Resizing and its gradient: every mode, coordinate and rounding, along axes of every kind."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import DTYPES
from foreplan.ops.interpolation import COORDINATES, MODES, ROUNDINGS
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.runtime.cuda.launch import Copy
from foreplan.runtime.cuda.table import kernel_for
from tests.engines.engine import ENGINES
from tests.gpu.check import DEVICE, check, made, run
from tests.gpu.compiled import needs_gcc
from tests.kernels import as_images, expected, layouts, normal
from tests.ops.check import type_of

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]
# before and after
CASES = {
    "one element": ((1, 2, 1, 1), (1, 2, 1, 1)),
    "twice": ((2, 3, 5, 7), (2, 3, 10, 14)),
    "from one": ((2, 5, 1, 1), (2, 5, 6, 3)),
    "to one": ((2, 5, 6, 3), (2, 5, 1, 1)),
    "larger and smaller": ((1, 17, 5, 13), (1, 17, 11, 4)),
    "one axis of it": ((2, 33, 4, 5), (2, 33, 4, 8)),
    "lines": ((2, 3, 17), (2, 3, 29)),
    "volumes": ((1, 3, 4, 3, 5), (1, 3, 6, 5, 4)),
    "channels too": ((2, 3, 4, 5), (4, 7, 3, 5)),
    "no other axis": ((7,), (19,)),
}


def checked(before: tuple[int, ...], after: tuple[int, ...], *choices: object, **more: object) -> None:
    """Both ways, as images lie and in C order."""
    for op, x in (
        (Resize(after, *choices, **more), normal(*before)),  # type: ignore[arg-type]
        (ResizeGrad(after, *choices, **more, extents=before), normal(*after)),  # type: ignore[arg-type]
    ):
        ENGINES["cuda"].check_lying(op, x, ways=layouts(x))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_shapes(mode: str, case: str) -> None:
    checked(*CASES[case], mode)


@pytest.mark.parametrize("coordinate", COORDINATES)
@pytest.mark.parametrize("mode", MODES)
def test_coordinates(mode: str, coordinate: str) -> None:
    for after in ((1, 3, 10, 14), (1, 3, 3, 1), (1, 3, 13, 5)):
        checked((1, 3, 5, 7), after, mode, coordinate)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("coordinate", COORDINATES)
def test_roundings(coordinate: str, rounding: str) -> None:
    """Coordinates of small extents often are halves; each element is the one that NumPy takes."""
    for before, after in product((1, 2, 3, 5, 6, 9, 10, 12), repeat=2):
        check(Resize((after,), "nearest", coordinate, rounding=rounding), np.arange(before, dtype=np.int32))
    checked((10, 6), (15, 4), "nearest", coordinate, rounding=rounding)


def test_scales_that_are_not_the_ratio() -> None:
    for mode in MODES:
        checked((1, 2, 9, 8), (1, 2, 13, 6), mode, scales=(1.0, 1.0, 1.5, 0.8))
        checked((1, 2, 9, 8), (1, 2, 9, 8), mode, scales=(1.0, 1.0, 1.1, 1.0))
        checked((1, 2, 9, 8), (1, 2, 20, 6), mode, scales=(1.0, 1.0, 1.0, 3.0))  # many read the edge


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("how", [{"antialias": True}, {"exclude_outside": True}, {"cubic_a": -0.5}])
def test_weights(mode: str, how: dict[str, object]) -> None:
    for after in ((1, 2, 3, 4), (1, 2, 20, 3), (1, 2, 1, 18)):
        checked((1, 2, 9, 12), after, mode, **how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["larger and smaller", "volumes", "channels too"])
def test_one_axis_after_the_other(mode: str, case: str, one_axis_a_pass: None) -> None:
    """Where a thread would have too much to add up; what lies between is in the workspace."""
    before, after = CASES[case]
    kernel, _, _ = made(ResizeGrad(after, mode, extents=before), [type_of(normal(*after))])
    changed = sum(a != b for a, b in zip(before, after))
    assert len(kernel.instructions) == 1 + changed
    assert kernel.workspace >= 4 * math.prod(map(min, before, after))
    checked(before, after, mode)


def test_an_image_from_one_element_is_summed_up_by_many_threads() -> None:
    before, after = (2, 3, 1, 1), (2, 3, 40, 50)
    kernel, _, _ = made(ResizeGrad(after, extents=before), [type_of(normal(*after))])
    assert len(kernel.instructions) == 3
    checked(before, after, "linear", "align_corners")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("mode", MODES)
def test_other_floats(mode: str, dtype: str, one_axis_a_pass: None) -> None:
    """Rounded once, of what NumPy gives in float64."""
    narrow = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(dtype, 1e-12)
    before, after = (1, 19, 5, 6), (1, 19, 8, 3)
    for op, shape in ((Resize(after, mode), before), (ResizeGrad(after, mode, extents=before), after)):
        x = normal(*shape).astype(DTYPES[dtype].numpy)
        for windows in layouts(x):
            (found,) = run(op, [x], windows)
            (wanted,) = expected(op, [x.astype(np.float64)])
            assert found.dtype == x.dtype
            np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=narrow, atol=1e-5 * narrow**0.5)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64"])
def test_what_is_not_interpolated_may_be_of_any_type(dtype: str) -> None:
    x = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(DTYPES[dtype].numpy)
    check(Resize((2, 3, 9, 3), "nearest"), x, windows=as_images(x))
    check(Resize((2, 6, 4, 5), "nearest", "asymmetric", rounding="floor"), x)


def test_numbers_that_are_none_spread_to_those_that_read_them() -> None:
    before, after = (1, 2, 6, 7), (1, 2, 9, 21)
    x, g = normal(*before), normal(*after)
    x[0, 0, 2, 3], x[0, 1, 5, 6], g[0, 0, 4, 4], g[0, 1, 0, 0] = np.nan, np.inf, np.nan, np.nan
    for mode in MODES:
        ENGINES["cuda"].check_lying(Resize(after, mode, "align_corners"), x, ways=layouts(x))
        ENGINES["cuda"].check_lying(ResizeGrad(after, mode, "align_corners", extents=before), g, ways=layouts(g))


def test_inputs_that_lie_anyhow() -> None:
    x = normal(2, 3, 5, 4)
    for strides in ((240, 80, -16, 4), (4, 8, 24, 120), (0, 0, 0, 0)):
        given = x if any(strides) else np.full_like(x, 0.5)
        check(Resize((2, 3, 7, 9)), given, windows=[Window(type_of(x), strides)])


def test_nothing_to_do_is_a_copy() -> None:
    x = normal(2, 3, 4, 5)
    kernel, _, _ = made(Resize(x.shape), [type_of(x)])
    assert [type(each) for each in kernel.instructions] == [Copy]
    check(Resize(x.shape, "cubic"), x, rtol=0, atol=0)
    check(ResizeGrad(x.shape, extents=x.shape), x, rtol=0, atol=0)


def test_coordinates_that_fall_are_left_to_others() -> None:
    (x, y), scales = (TensorType(DTYPES["float32"], shape) for shape in ((3,), (2,))), (0.1,)
    op = Resize((2,), "linear", "align_corners", scales)
    assert kernel_for(op, [Window.dense(x)], [Window.dense(y)], DEVICE) is None
