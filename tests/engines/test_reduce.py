"""Reductions along any axes of tensors however they lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.graph import Window
from foreplan.graph.types import DTYPES
from foreplan.ops.reduce import Reduce
from tests.engines.engine import ENGINES, Engine, require
from tests.kernels import COMPUTED, as_images, assert_near, expected, normal
from tests.ops.check import type_of
from tests.profile import pick


def near(engine: Engine, x: np.ndarray, axes: tuple[int, ...]) -> dict[str, float]:
    """How far results may be: sums are as good as exact on `cpu`; on cards they round, each part of them."""
    rounding = 2.0**-23 * float(np.abs(x).sum(axes).max())
    return {"rtol": 1e-6, "atol": 1e-5} if engine.name == "cpu" else {"rtol": 1e-5, "atol": 1e-6 + rounding}


@pytest.mark.bfloat16
@pytest.mark.parametrize("how", ["sum", "mean", "prod", "max", "min"])
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2), ()])
def test_any_axes(engine: Engine, how: str, axes: tuple[int, ...]) -> None:
    for shape in ((3, 5, 7), (2, 33, 64), (5, 1, 17), (1, 129, 2), (2, 3, 1030)):
        for keepdims in (False, True):
            engine.check(
                Reduce(how, axes, keepdims, wide=keepdims), normal(*shape), **near(engine, normal(*shape), axes)
            )


@pytest.mark.bfloat16
@pytest.mark.parametrize("shape", [(2, 24, 5, 7), (3, 1, 2, 2), (1, 600, 3, 3), (2, 2, 40, 50), (3, 37, 9, 5)])
@pytest.mark.parametrize("axes", [(2, 3), (0, 2, 3), (1,), (0, 1, 2, 3), (3,)])
def test_images_with_their_channels_last(engine: Engine, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = normal(*shape)
    for how in ("sum", "mean", "max"):
        if engine.narrow:
            engine.check(Reduce(how, axes), x, windows=as_images(x))
            continue
        (found,) = engine.run(Reduce(how, axes), [x], as_images(x))
        np.testing.assert_allclose(found, getattr(x.astype(np.float64), how)(axis=axes), **near(engine, x, axes))


@pytest.mark.parametrize("how", ["sum", "max"])
def test_one_image_that_is_repeated(engine: Engine, how: str) -> None:
    x = np.broadcast_to(normal(37, 1, 1), (3, 37, 9, 5))
    engine.check(Reduce(how, (0, 2, 3)), x, windows=[Window(type_of(x), (0, 4, 0, 0))], atol=1e-4)


@pytest.mark.bfloat16
@pytest.mark.parametrize("rows", [1, 3, 9, 70, 1100])
@pytest.mark.parametrize("width", [8, 12, 200])
def test_rows_with_gaps_between_them(engine: Engine, width: int, rows: int) -> None:
    x = normal(rows, 2, width)
    for axes in ((0,), (0, 1)):
        engine.check(Reduce("sum", axes), x, atol=1e-4)
    for step in (width + 8, width + 1):
        apart = Window(type_of(x), (8 * step, 4 * step, 4))
        engine.check(Reduce("max", (0, 1)), x, windows=[apart])
        engine.check(Reduce("mean", (0,)), x, windows=[apart], atol=1e-4)


@pytest.mark.parametrize("dtype", [x.name for x in COMPUTED if x.name not in ("float32", "uint16", "uint32")])
@pytest.mark.parametrize("how", ["sum", "prod", "max", "min"])
def test_elements_of_any_type(engine: Engine, how: str, dtype: str) -> None:
    x = (3 * normal(6, 5, 40)).astype(DTYPES[dtype].numpy)
    rounding = {"float64": 1e-14, "float16": 2e-3, "bfloat16": 1e-2}.get(dtype, 0.0)
    for axes in ((0,), (2,), (0, 2))[: 3 if how == "sum" else 2]:
        engine.check(Reduce(how, axes), x, rtol=rounding, atol=rounding)
    if DTYPES[dtype].itemsize == 2 and DTYPES[dtype].is_float:
        engine.check(Reduce(how, (2,), wide=True), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("how", ["sum", "mean", "prod", "max", "min"])
def test_infinity_and_nan_come_through(engine: Engine, how: str, dtype: str) -> None:
    x = np.ones((6, 35), dtype)
    x[1, 3], x[2, 30], x[3, 34], x[4, 3], x[4, 9], x[0, 3] = np.inf, np.nan, -np.inf, np.inf, -np.inf, 2
    with np.errstate(invalid="ignore"):
        engine.check(Reduce(how, (1,)), x, rtol=1e-6)
        engine.check(Reduce(how, (0,)), x, rtol=1e-6)


def test_nothing_adds_up_to_zero(engine: Engine) -> None:
    for how, axes, shape in (
        ("sum", (1,), (3, 0, 4)),
        ("sum", (1,), (3, 5, 0)),
        ("sum", (0,), (3, 0)),
        ("prod", (0,), (0, 5)),
        ("mean", (1,), (3, 0, 4)),
        ("mean", (1,), (3, 0)),
    ):
        engine.check(Reduce(how, axes), normal(*shape), rtol=0, atol=0)


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=pick(6, 10, 60), deadline=None)
@given(st.data())
def test_any_strides(name: str, data: st.DataObject) -> None:
    require(name)
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 17]), min_size=1, max_size=4), "shape")
    strides, step = [0] * len(shape), 4 * data.draw(st.sampled_from([0, 1, 1, 3]))
    for axis in data.draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis]
    axes = sorted(data.draw(st.sets(st.sampled_from(range(len(shape))))))
    x = normal(*shape) if step else np.full(shape, 2.5, np.float32)
    op = Reduce(data.draw(st.sampled_from(["sum", "max"])), tuple(axes), data.draw(st.booleans()))
    engine = ENGINES[name]
    exact = expected(op, [x.astype(np.float64)])  # NumPy's sums in float32 round more than those of `cpu`
    for kernel, results in engine.results(op, [x], [Window(type_of(x), tuple(strides))], None):
        assert_near(results, exact, **near(engine, x, op.axes), name=kernel)
    assert math.prod(shape) == x.size
