"""Reductions along any axes of tensors however they lie."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.reduce import Reduce
from foreplan.runtime.cpu.threads import set_threads
from tests.cpu.check import check, kernel_for, needs_onednn, run, type_of

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    """The same numbers whichever tests ran before."""
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def exact_sum(numbers: np.ndarray) -> float:
    return float(sum((Fraction(float(x)) for x in numbers.reshape(-1)), Fraction(0)))


@pytest.mark.parametrize("how", ["sum", "mean", "prod", "max", "min"])
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2), ()])
def test_any_axes(how: str, axes: tuple[int, ...]) -> None:
    for shape in ((3, 5, 7), (2, 33, 64), (5, 1, 17), (1, 4, 1), (2, 3, 1030)):
        check(Reduce(how, axes), f32(*shape), rtol=1e-6, atol=1e-5)
        check(Reduce(how, axes, True), f32(*shape), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 24, 5, 7), (3, 1, 2, 2), (1, 600, 3, 3), (2, 2, 40, 50)])
@pytest.mark.parametrize("axes", [(2, 3), (0, 2, 3), (1,), (0, 1, 2, 3), (3,)])
def test_images_with_their_channels_last(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = f32(*shape)
    for how in ("sum", "mean", "max"):
        check(Reduce(how, axes), x, windows=[channels_last(type_of(x))], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "int64", "int32", "int8", "uint8", "bool"])
@pytest.mark.parametrize("how", ["sum", "prod", "max", "min"])
def test_every_element_type(how: str, dtype: str) -> None:
    x = (RNG.standard_normal((6, 5, 40)) * 3).astype(dtype)
    tolerance = 1e-14 if dtype == "float64" else 0.0
    for axes in ((0,), (2,), (0, 2)):
        check(Reduce(how, axes), x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2)])
def test_sums_of_halves_are_rounded_once(axes: tuple[int, ...]) -> None:
    x = (RNG.standard_normal((6, 5, 40)) * 3).astype(np.float16)
    (found,) = run(Reduce("sum", axes), [x])
    np.testing.assert_array_equal(found, x.astype(np.float64).sum(axes).astype(np.float16))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_are_exact_to_half_a_unit_or_so(axis: int, dtype: str) -> None:
    x = (RNG.standard_normal((3000, 3000)) * 10.0 ** RNG.integers(-6, 6, (3000, 3000))).astype(dtype)
    x = np.moveaxis(x[:, :5], 0, axis).copy()
    (found,) = run(Reduce("sum", (axis,)), [x])
    for line, total in zip(np.moveaxis(x, axis, 1), found):
        assert abs(float(total) - exact_sum(line)) <= 0.51 * np.spacing(abs(total))


def test_sums_that_cancel_and_sums_of_a_million() -> None:
    x = np.tile(np.array([1e16, 1.0, -1e16], np.float64), 1000)
    assert run(Reduce("sum", (0,)), [x])[0] == 1000.0
    ones = np.full(1 << 20, 0.1, np.float32)
    assert run(Reduce("sum", (0,)), [ones])[0] == np.float32((1 << 20) * float(np.float32(0.1)))
    assert run(Reduce("mean", (0,)), [ones])[0] == np.float32(0.1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("how", ["sum", "mean", "prod", "max", "min"])
def test_infinity_and_nan_come_through(how: str, dtype: str) -> None:
    x = np.ones((6, 35), dtype)
    x[1, 3], x[2, 30], x[3, 34], x[4, 3], x[4, 9], x[0, 3] = np.inf, np.nan, -np.inf, np.inf, -np.inf, 2
    with np.errstate(invalid="ignore"):
        check(Reduce(how, (1,)), x, rtol=1e-6)
        check(Reduce(how, (0,)), x, rtol=1e-6)


def test_nothing_adds_up_to_zero() -> None:
    check(Reduce("sum", (1,)), f32(3, 0, 4), rtol=0, atol=0)
    check(Reduce("sum", (1,)), f32(3, 5, 0), rtol=0, atol=0)
    check(Reduce("prod", (0,)), f32(0, 5), rtol=0, atol=0)
    check(Reduce("mean", (1,)), f32(3, 0, 4), rtol=0, atol=0)
    check(Reduce("mean", (1,)), f32(3, 0), rtol=0, atol=0)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x = f32(300, 4000)
    windows = [Window.dense(type_of(x))]
    try:
        for axes in ((0,), (1,)):
            results = []
            for threads in (1, 3):
                op = Reduce("sum", axes)
                layout = [Window.dense(y) for y in op.infer([type_of(x)])]
                kernel = kernel_for(op, windows, layout, threads)
                assert kernel is not None
                out = np.zeros(layout[0].shape, np.float32)
                kernel.bind([x], [out], np.zeros(0, np.uint8))()
                results.append(out.tobytes())
            assert results[0] == results[1]
    finally:
        set_threads(1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_strides(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 17]), min_size=1, max_size=4), "shape")
    strides, step = [0] * len(shape), 4 * data.draw(st.sampled_from([0, 1, 1, 3]))
    for axis in data.draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis]
    axes = sorted(data.draw(st.sets(st.sampled_from(range(len(shape))))))
    x = f32(*shape) if step else np.full(shape, 2.5, np.float32)
    op = Reduce(data.draw(st.sampled_from(["sum", "max"])), tuple(axes), data.draw(st.booleans()))
    check(op, x, windows=[Window(type_of(x), tuple(strides))], rtol=1e-6, atol=1e-5)
    assert math.prod(shape) == x.size
