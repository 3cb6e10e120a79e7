"""Convolution and its gradients against JAX, SciPy and differences; memory that does not grow with the image."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from foreplan.graph import TensorType, as_dtype
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad, conv, conv_transpose
from tests.frontend.onnx.models import of_one_node
from tests.ops.check import built, check_vjp, refused, run_op, type_of
from tests.oracle.peers import jax, jit

# (x shape, w shape, strides, pads, dilations, groups)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Any, tuple[int, ...], int]] = {
    "same": ((2, 3, 7, 6), (4, 3, 3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    "strided": ((2, 3, 9, 8), (4, 3, 3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 1),
    "stem": ((1, 3, 15, 14), (2, 3, 7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1), 1),
    "uneven": ((1, 2, 8, 9), (3, 2, 2, 3), (3, 2), ((0, 1), (2, 1)), (1, 1), 1),
    "dilated": ((1, 2, 10, 9), (3, 2, 3, 3), (1, 2), ((2, 2), (2, 3)), (2, 3), 1),
    "cropped": ((1, 2, 9, 8), (2, 2, 3, 3), (1, 1), ((-1, 0), (-2, -1)), (1, 1), 1),
    "wide padding": ((1, 2, 3, 2), (2, 2, 2, 2), (1, 1), ((3, 3), (4, 2)), (1, 1), 1),
    "pointwise": ((2, 4, 5, 3), (6, 4, 1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    "pointwise grouped": ((2, 4, 5, 3), (6, 2, 1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 2),
    "pointwise strided": ((2, 4, 5, 6), (3, 4, 1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1), 1),
    "grouped": ((2, 6, 5, 6), (4, 3, 3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 2),
    "depthwise": ((2, 5, 7, 6), (5, 1, 3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 5),
    "depthwise uneven": ((2, 5, 7, 6), (5, 1, 2, 3), (1, 1), ((2, 0), (0, 3)), (2, 1), 5),
    "depthwise cropped": ((1, 3, 7, 8), (3, 1, 3, 3), (1, 1), ((-1, 1), (1, -2)), (1, 1), 3),
    "depthwise wide padding": ((1, 3, 2, 3), (3, 1, 3, 3), (1, 1), ((4, 5), (3, 4)), (1, 1), 3),
    "depthwise strided": ((2, 5, 7, 6), (5, 1, 3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 5),
    "depthwise doubled": ((2, 3, 6, 6), (6, 1, 3, 3), (1, 1), ((0, 1), (1, 0)), (1, 1), 3),
    "one axis": ((2, 3, 11), (4, 3, 4), (2,), ((1, 2),), (2,), 1),
    "one axis depthwise": ((2, 3, 11), (3, 1, 3), (1,), ((2, 0),), (1,), 3),
    "three axes": ((1, 2, 4, 5, 6), (3, 2, 2, 3, 2), (1, 2, 1), ((1, 0), (1, 1), (0, 1)), (1, 1, 2), 1),
    "one window": ((3, 2, 4, 4), (5, 2, 4, 4), (4, 4), ((0, 0), (0, 0)), (1, 1), 1),
}


def _reference(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, strides, pads, rhs_dilation=dilations, feature_group_count=groups, precision="highest"
    )


@cache
def _case(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray], tuple[Any, ...]]:
    """x, w, cotangent, [y, dx, dw] as JAX has them in float64, and the geometry."""
    xs, ws, *geometry = CASES[name]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(xs), rng.standard_normal(ws)
    y = Conv(*geometry).infer([type_of(x), type_of(w)])[0]
    g = rng.standard_normal(y.shape)

    @jit()
    def reference(x: Any, w: Any, g: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: _reference(x, w, *geometry), x, w)
        return y, *pull(g)

    with jax.enable_x64(True):
        return x, w, g, [np.asarray(a) for a in reference(x, w, g)], tuple(geometry)


@pytest.fixture(params=["whole", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with blocks as they are, once with blocks so small that every loop over them turns."""
    if request.param == "small blocks":
        from foreplan.ops import window
        from foreplan.ops.conv import depthwise
        from foreplan.ops.conv import kernels as conv_kernels

        monkeypatch.setattr(conv_kernels, "COLUMN_BYTES", 512)
        monkeypatch.setattr(conv_kernels, "PRODUCT_BYTES", 256)
        monkeypatch.setattr(conv_kernels, "FEW_POSITIONS", 20)
        monkeypatch.setattr(window, "PLANE_BLOCK", 16)
        monkeypatch.setattr(depthwise, "FLAT_BLOCK", 40)
        conv_kernels.blocking.cache_clear()
        request.addfinalizer(conv_kernels.blocking.cache_clear)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_product_is_added_to_a_weight_gradient_of_one_image_or_more(images: int, groups: int) -> None:
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((images, 4, 3, 2)), rng.standard_normal((images, 6, 3, 2))
    before = rng.standard_normal((6, 4 // groups, 1, 1))
    (got,) = run_op(ConvWeightGrad((1, 1), ((0, 0), (0, 0)), (1, 1), groups, kernel=(1, 1)), x, g, before)
    parts = [
        np.einsum("nkhw,nchw->kc", *both) for both in zip(np.split(g, groups, axis=1), np.split(x, groups, axis=1))
    ]
    np.testing.assert_allclose(got, before + np.concatenate(parts)[:, :, None, None], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_against_jax(name: str) -> None:
    x, w, g, (y, dx, dw), geometry = _case(name)
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 2e-5)):
        x, w, g = x.astype(dtype), w.astype(dtype), g.astype(dtype)
        np.testing.assert_allclose(run_op(Conv(*geometry), x, w)[0], y, tolerance, 20 * tolerance)
        before = np.random.default_rng(3).standard_normal(y.shape).astype(dtype)
        np.testing.assert_allclose(run_op(Conv(*geometry), x, w, before)[0], y + before, tolerance, 20 * tolerance)
        got = run_op(ConvDataGrad(*geometry, spatial=x.shape[2:]), g, w)[0]
        np.testing.assert_allclose(got, dx, tolerance, 20 * tolerance)
        before = np.random.default_rng(1).standard_normal(x.shape).astype(dtype)
        got = run_op(ConvDataGrad(*geometry, spatial=x.shape[2:]), g, w, before)[0]
        np.testing.assert_allclose(got, dx + before, tolerance, 20 * tolerance)
        got = run_op(ConvWeightGrad(*geometry, kernel=w.shape[2:]), x, g)[0]
        np.testing.assert_allclose(got, dw, tolerance, 20 * tolerance)
        before = np.random.default_rng(2).standard_normal(w.shape).astype(dtype)
        got = run_op(ConvWeightGrad(*geometry, kernel=w.shape[2:]), x, g, before)[0]
        np.testing.assert_allclose(got, dw + before, tolerance, 20 * tolerance)


def test_against_scipy() -> None:
    import scipy.signal

    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((1, 2, 8, 9)), rng.standard_normal((3, 2, 3, 4))
    expected = [sum(scipy.signal.correlate(x[0, c], w[k, c], "valid") for c in range(2)) for k in range(3)]
    op = Conv((1, 1), ((0, 0), (0, 0)), (1, 1))
    np.testing.assert_allclose(run_op(op, x, w)[0][0], expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["same", "strided", "pointwise grouped", "depthwise strided", "one axis"])
def test_differences(name: str) -> None:
    xs, ws, strides, pads, dilations, groups = CASES[name]
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(shape) for shape in (xs, ws, ws[:1])]
    check_vjp(
        lambda b, x, w, c: conv(b, x, w, c, strides=strides, pads=pads, dilations=dilations, groups=groups), *arrays
    )


@pytest.mark.parametrize("name", ["strided", "grouped", "depthwise"])
def test_gradients_are_differentiable(name: str) -> None:
    x, w, g, _, geometry = _case(name)
    check_vjp(lambda b, g, w: b.apply(ConvDataGrad(*geometry, spatial=x.shape[2:]), g, w), g, w)
    check_vjp(lambda b, g, w, x: b.apply(ConvDataGrad(*geometry, spatial=x.shape[2:]), g, w, x), g, w, x)
    check_vjp(lambda b, x, g: b.apply(ConvWeightGrad(*geometry, kernel=w.shape[2:]), x, g), x, g)
    check_vjp(lambda b, x, g, w: b.apply(ConvWeightGrad(*geometry, kernel=w.shape[2:]), x, g, w), x, g, w)


@pytest.mark.parametrize(
    ("strides", "pads", "dilations", "output_padding", "groups"),
    [
        ((1, 1), ((0, 0), (0, 0)), (1, 1), (0, 0), 1),
        ((2, 2), ((1, 1), (1, 1)), (1, 1), (1, 1), 1),
        ((3, 2), ((0, 1), (2, 1)), (1, 1), (2, 0), 2),
        ((1, 2), ((1, 0), (0, 2)), (2, 3), (0, 1), 1),
    ],
)
def test_transposed(strides: Any, pads: Any, dilations: Any, output_padding: Any, groups: int) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 4, 4, 5)).astype(np.float32)
    w, c = rng.standard_normal((4, 3, 3, 2)).astype(np.float32), rng.standard_normal(3 * groups).astype(np.float32)
    how = {"strides": strides, "dilations": dilations, "output_padding": output_padding}
    sides = [side for ends in zip(*pads) for side in ends]
    expected = of_one_node("ConvTranspose", x, group=groups, pads=sides, constants={"w": w, "c": c}, **how)
    (got,) = built(lambda b, x, w, c: conv_transpose(b, x, w, c, pads=pads, groups=groups, **how), x, w, c)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def _type(*shape: int) -> TensorType:
    return TensorType(as_dtype("float32"), shape)


def test_chain_of_wide_images_needs_little_workspace() -> None:
    channels = (1, 256, 128, 64, 32, 16, 8, 4, 2, 1)
    pads = ((1, 1), (1, 1))
    for c, k in pairwise(channels):
        x, w, y = _type(1, c, 1024, 1024), _type(k, c, 3, 3), _type(1, k, 1024, 1024)
        for op, inputs, output in (
            (Conv((1, 1), pads, (1, 1)), (x, w), y),
            (ConvDataGrad((1, 1), pads, (1, 1), spatial=(1024, 1024)), (y, w), x),
            (ConvWeightGrad((1, 1), pads, (1, 1), kernel=(3, 3)), (x, y), w),
        ):
            assert op.infer(inputs) == (output,)
            assert op.workspace(inputs, (output,)) <= 8 << 20, op


@pytest.mark.parametrize("name", CASES)
def test_cost_is_two_a_multiply_add(name: str) -> None:
    xs, ws, strides, pads, dilations, groups = CASES[name]
    geometry = (strides, pads, dilations, groups)
    x, w = _type(*xs), _type(*ws)
    (y,) = Conv(*geometry).infer([x, w])
    expected = 2 * y.size * int(np.prod(ws[1:]))
    assert Conv(*geometry).cost([x, w], [y]).flops == expected
    assert ConvDataGrad(*geometry, spatial=xs[2:]).cost([y, w], [x]).flops == expected
    assert ConvWeightGrad(*geometry, kernel=ws[2:]).cost([x, y], [w]).flops == expected


def test_what_does_not_fit_is_refused() -> None:
    once = ((1, 1), ((0, 0), (0, 0)), (1, 1))
    images, weights = "float32[1,3,5,5]", "float32[4,3,3,3]"
    refused("need 2 image channels", Conv(*once), images, "float32[4,2,3,3]")
    refused("needs images", Conv(*once), images, "float32[4,3,3]")
    refused("does not fit", Conv(*once), "float32[1,3,2,5]", weights)
    refused("spatial axes", Conv(*once), "float32[1,3,5]", "float32[4,3,3]")
    refused("bias", Conv(*once), images, weights, "float32[3]")
    gradient = ["float32[1,4,3,3]", weights]
    refused("dx is added to must be", ConvDataGrad(*once, spatial=(5, 5)), *gradient, "float32[1,3,5,4]")
    refused("windows", ConvDataGrad(*once, spatial=(9, 9)), *gradient)
    refused("at least 1", Conv((0, 1), *once[1:]), images, weights)
    refused("a multiple of 2 output channels", Conv(*once, 2), "float32[1,4,5,5]", "float32[3,2,3,3]")
    refused("at least one channel", Conv((1,), ((0, 0),), (1,)), "float32[1,0,5]", "float32[2,0,3]")
