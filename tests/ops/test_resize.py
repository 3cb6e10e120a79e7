"""Resizing against ONNX Runtime and ONNX's reference, gradients against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import GraphBuilder, TensorType, as_dtype
from foreplan.ops import resize as resize_module
from foreplan.ops.interpolation import COORDINATES, ROUNDINGS
from foreplan.ops.resize import Resize, ResizeGrad, resize
from tests.frontend.onnx.models import by_onnxruntime, model, node
from tests.ops.check import check_vjp, refused, run_op


@pytest.fixture(params=["whole", "small blocks"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small blocks":
        monkeypatch.setattr(resize_module, "BLOCK", 5)


def _model(x: np.ndarray, shape: Any = None, scales: Any = None, **attributes: Any) -> onnx.ModelProto:
    constants = {} if scales is None else {"scales": np.array(scales, np.float32)}
    constants |= {} if shape is None else {"sizes": np.array(shape, np.int64)}
    read = f"x - {'-' if scales is None else 'scales'} {'' if shape is None else 'sizes'}"
    return model([node("Resize", read, "y", **attributes)], {"x": x.shape}, ["y"], constants, 19)


def _runtime(x: np.ndarray, *how: Any, **attributes: Any) -> np.ndarray:
    return by_onnxruntime(_model(x, *how, **attributes), x=x)["y"]


def _reference(x: np.ndarray, *how: Any, **attributes: Any) -> np.ndarray:
    return onnx.reference.ReferenceEvaluator(_model(x, *how, **attributes)).run(None, {"x": x})[0]


def _image(shape: tuple[int, ...] = (2, 3, 5, 7)) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


SIZES = [(10, 14), (8, 5), (3, 4), (5, 9), (1, 1), (13, 7)]


@pytest.mark.parametrize("coordinate", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_modes_and_coordinates(mode: str, coordinate: str) -> None:
    x = _image()
    for size in SIZES:
        shape = (2, 3, *size)
        expected = _runtime(x, shape, mode=mode, coordinate_transformation_mode=coordinate)
        got = run_op(Resize(shape, mode, coordinate), x)[0]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=str(size))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_roundings(rounding: str) -> None:
    x = _image()
    for size in SIZES:
        shape = (2, 3, *size)
        expected = _runtime(
            x, shape, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode=rounding
        )
        np.testing.assert_array_equal(run_op(Resize(shape, "nearest", "asymmetric", rounding=rounding), x)[0], expected)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_scales_that_are_not_the_ratio(mode: str) -> None:
    x = _image()
    scales = (1.0, 1.0, 1.3, 0.7)
    expected = _runtime(x, None, scales, mode=mode)
    got = run_op(Resize(expected.shape, mode, scales=scales), x)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_cubic_that_excludes_what_is_outside() -> None:
    x = _image()
    expected = _runtime(x, (2, 3, 8, 9), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5)
    got = run_op(Resize((2, 3, 8, 9), "cubic", cubic_a=-0.5, exclude_outside=True), x)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_antialias(mode: str) -> None:
    x = _image((1, 2, 9, 12))
    for size in ((4, 5), (3, 12), (2, 3)):
        expected = _reference(x, (1, 2, *size), mode=mode, antialias=1)
        got = run_op(Resize((1, 2, *size), mode, antialias=True), x)[0]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_other_axes_and_integers() -> None:
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    expected = x.repeat(2, 0).repeat(3, 2)
    np.testing.assert_array_equal(run_op(Resize((4, 3, 12), "nearest", "asymmetric", rounding="floor"), x)[0], expected)
    line = _image((1, 2, 6))
    np.testing.assert_allclose(
        run_op(Resize((1, 2, 11), "linear"), line)[0], _runtime(line, (1, 2, 11), mode="linear"), rtol=1e-5, atol=1e-6
    )
    volume = _image((1, 2, 3, 4, 5))
    np.testing.assert_allclose(
        run_op(Resize((1, 2, 5, 3, 8), "linear"), volume)[0],
        _runtime(volume, (1, 2, 5, 3, 8), mode="linear"),
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_array_equal(run_op(Resize(x.shape, "nearest"), x)[0], x)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_differences(mode: str) -> None:
    x = _image((1, 2, 4, 5))
    for shape in ((1, 2, 8, 10), (1, 2, 3, 9), (1, 2, 2, 2)):
        check_vjp(lambda b, v, shape=shape: resize(b, v, shape, mode=mode), x)
    check_vjp(lambda b, v: resize(b, v, (1, 2, 2, 3), mode=mode, antialias=True), x)
    check_vjp(lambda b, g: b.apply(ResizeGrad((1, 2, 4, 5), mode, extents=(1, 2, 3, 8)), g), x)


def test_what_does_not_fit_is_refused() -> None:
    x = TensorType(as_dtype("int32"), (1, 2, 3, 4))
    refused("floating-point", Resize((1, 2, 6, 8)), str(x))
    refused("cannot be resized", Resize((1, 2, 6), "nearest"), str(x))
    refused("gradient must be", ResizeGrad((1, 2, 6, 8), "nearest", extents=(1, 2, 3, 4)), str(x))
    with pytest.raises(ValueError, match="mode must be one of"):
        Resize((1, 2, 6, 8), "smooth")
    with pytest.raises(ShapeError, match="coordinate must be one of"):
        b = GraphBuilder()
        resize(b, b.input("x", x), (1, 2, 6, 8), coordinate="nowhere")


def test_an_axis_that_changes_has_so_many_positions_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize_module, "MOST_POSITIONS", 8)
    b = GraphBuilder()
    short = b.input("short", TensorType(as_dtype("float32"), (1, 1, 2)))
    long = b.input("long", TensorType(as_dtype("float32"), (1, 1, 9, 2)))
    for x, shape in ((short, (1, 1, 8)), (long, (1, 1, 9, 4))):
        assert resize(b, x, shape, mode="nearest").shape == shape
    for x, shape in ((short, (1, 1, 9)), (long, (1, 1, 2, 2))):
        with pytest.raises(UnsupportedError, match="axes of 8 elements at most"):
            resize(b, x, shape, mode="nearest")
