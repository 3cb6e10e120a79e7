"""Pooling against ONNX Runtime and brute force, gradients against differences."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder, TensorType, as_dtype
from foreplan.ops import window
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad, avg_pool, lrn, max_pool
from foreplan.ops.window import Windows, count_positions, is_empty
from tests.frontend.onnx.models import of_one_node
from tests.ops.check import built, check_vjp, refused, run_op, type_of

GEOMETRIES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "halving": ((2, 3, 8, 6), {"kernel": (2, 2)}),
    "resnet": ((2, 3, 9, 11), {"kernel": (3, 3), "strides": (2, 2), "pads": ((1, 1), (1, 1))}),
    "uneven": ((1, 2, 7, 9), {"kernel": (2, 3), "strides": (3, 1), "pads": ((0, 1), (1, 2))}),
    "ceiling": ((1, 2, 8, 9), {"kernel": (3, 2), "strides": (2, 2), "ceil_mode": True}),
    "ceiling padded": (
        (1, 2, 8, 7),
        {"kernel": (3, 3), "strides": (2, 3), "pads": ((1, 1), (1, 0)), "ceil_mode": True},
    ),
    "ceiling beyond the image": (
        (1, 2, 6, 6),
        {"kernel": (2, 2), "strides": (4, 4), "pads": ((0, 1), (0, 1)), "ceil_mode": True},
    ),
    "ceiling of nothing": ((1, 2, 6, 7), {"kernel": (3, 2), "strides": (1, 1), "ceil_mode": True}),
    "dilated": ((1, 2, 9, 10), {"kernel": (3, 2), "strides": (1, 2), "dilations": (2, 3)}),
    "one axis": ((2, 3, 10), {"kernel": (3,), "strides": (2,), "pads": ((1, 1),)}),
    "three axes": ((1, 2, 4, 5, 6), {"kernel": (2, 3, 2), "strides": (2, 1, 2), "pads": ((0, 1), (1, 1), (0, 0))}),
}


def _attributes(geometry: dict[str, Any]) -> dict[str, Any]:
    found = {"kernel_shape": geometry["kernel"], "strides": geometry.get("strides", geometry["kernel"])}
    if "pads" in geometry:
        found["pads"] = [low for low, _ in geometry["pads"]] + [high for _, high in geometry["pads"]]
    if "dilations" in geometry:
        found["dilations"] = geometry["dilations"]
    return found | {"ceil_mode": int(geometry.get("ceil_mode", False))}


@pytest.fixture(params=["whole", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small blocks":
        monkeypatch.setattr(window, "PLANE_BLOCK", 7)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", GEOMETRIES)
def test_max(name: str) -> None:
    shape, geometry = GEOMETRIES[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected = of_one_node("MaxPool", x, **_attributes(geometry))
    np.testing.assert_array_equal(built(lambda b, v: max_pool(b, v, **geometry), x)[0], expected)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_mean(name: str, count_include_pad: bool) -> None:
    shape, geometry = GEOMETRIES[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected = of_one_node("AveragePool", x, **_attributes(geometry), count_include_pad=int(count_include_pad))
    (got,) = built(lambda b, v: avg_pool(b, v, count_include_pad=count_include_pad, **geometry), x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", GEOMETRIES)
def test_saved_index_is_the_first_winner(name: str) -> None:
    shape, geometry = GEOMETRIES[name]
    x = np.random.default_rng(0).integers(0, 4, shape).astype(np.float32)  # many ties
    b = GraphBuilder()
    op = max_pool(b, b.input("x", type_of(x)), **geometry) and b.nodes[-1].op
    assert isinstance(op, MaxPool)
    y, index = run_op(MaxPool(op.kernel, op.strides, op.pads, op.dilations, save_index=True), x)
    assert index.dtype == np.uint8
    np.testing.assert_array_equal(y, run_op(op, x)[0])
    taps = op.windows(shape[2:]).taps
    for place in np.ndindex(*y.shape):
        found = []
        for number, tap in enumerate(taps):
            at = [o * s - p[0] + r * d for o, s, p, r, d in zip(place[2:], op.strides, op.pads, tap, op.dilations)]
            if all(0 <= i < extent for i, extent in zip(at, shape[2:])):
                found.append((-x[(*place[:2], *at)], number))
        assert min(found) == (-y[place], index[place])


@pytest.mark.parametrize("name", GEOMETRIES)
def test_differences(name: str) -> None:
    shape, geometry = GEOMETRIES[name]
    x = np.random.default_rng(1).permutation(int(np.prod(shape))).reshape(shape) * 0.1
    check_vjp(lambda b, v: max_pool(b, v, **geometry), x)
    check_vjp(lambda b, v: avg_pool(b, v, **geometry), x)
    check_vjp(lambda b, v: avg_pool(b, v, count_include_pad=True, **geometry), x)


def test_training_saves_the_index() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorType(as_dtype("float32"), (1, 2, 4, 4)))
    plain = MaxPool((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1))
    (y,) = plain.for_training(b, [x], None) or ()  # type: ignore[arg-type]
    op = b.nodes[-1].op
    assert isinstance(op, MaxPool) and op.save_index and y.shape == (1, 2, 2, 2)
    assert op.for_training(b, [x], None) is None  # type: ignore[arg-type]


def test_large_windows_have_larger_indices() -> None:
    op = MaxPool((17, 17), (1, 1), ((0, 0), (0, 0)), (1, 1), save_index=True)
    x = np.zeros((1, 1, 18, 17), np.float32)
    x[0, 0, 16, 16] = 1
    y, index = run_op(op, x)
    assert index.dtype == np.uint16
    np.testing.assert_array_equal(index[0, 0, :, 0], [16 * 17 + 16, 15 * 17 + 16])
    dx = run_op(MaxPoolGrad(op.kernel, op.strides, op.pads, op.dilations, x.shape), index, np.ones_like(y))[0]
    np.testing.assert_array_equal(dx, x * 2)


def test_the_first_of_several_nans_is_saved() -> None:
    x = np.array([[[np.nan, 1.0, 2.0, np.nan, 5.0, 3.0]]], np.float32)
    op = MaxPool((3,), (1,), ((0, 0),), (1,), True)
    np.testing.assert_array_equal(run_op(op, x)[1], [[[0, 2, 1, 0]]])


@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_local_response_normalisation(size: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 7, 3, 4)).astype(np.float32)
    if size % 2:
        expected = of_one_node("LRN", x, size=size, alpha=0.3, beta=0.6, bias=1.5)
    else:  # ONNX Runtime has odd sizes only; the operator's definition, written out
        ends = [(max(0, c - (size - 1) // 2), c + size // 2 + 1) for c in range(7)]
        sums = np.stack([(x[:, low:high].astype(np.float64) ** 2).sum(1) for low, high in ends], 1)
        expected = x / (1.5 + 0.3 / size * sums) ** 0.6
    (got,) = built(lambda b, v: lrn(b, v, size, 0.3, 0.6, 1.5), x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    check_vjp(lambda b, v: lrn(b, v, size, 0.3, 0.6, 1.5), x)


def test_what_does_not_fit_is_refused() -> None:
    x, apart, far = "float32[1,2,3,3]", ((1, 1), ((0, 0), (0, 0)), (1, 1)), 10**12
    refused("does not fit", MaxPool((4, 4), *apart), x)
    refused("floating-point", AvgPool((2, 2), *apart), "int32[1,2,3,3]")
    refused("pools to", AvgPoolGrad((2, 2), *apart, shape=(1, 2, 9, 9)), x)
    refused("pools to", MaxPoolGrad((2, 2), *apart, shape=(1, 2, 9, 9)), x, x)
    refused(r"\[N, C", MaxPool((), (), (), ()), "float32[2,3]")
    refused("foreplan takes 4194304 at most", AvgPool((2, far), (1, 1), ((0, 1), (0, far - 1)), (1, 1)), x)


def test_of_a_window_only_the_taps_within_the_image_are_walked() -> None:
    """All of them, and nothing else: of a window that is far larger than the image, too."""
    rng = Random(0)
    for _ in range(300):
        axes = rng.randint(1, 3)
        extent, kernel, strides, dilations = (tuple(rng.randint(1, most) for _ in range(axes)) for most in (9, 5, 4, 3))
        pads = tuple((rng.randint(-1, 9), rng.randint(-1, 9)) for _ in range(axes))
        try:
            windows = Windows(
                extent, kernel, strides, pads, dilations, count_positions(extent, kernel, strides, pads, dilations)
            )
        except ShapeError:
            continue
        for box in windows.boxes(rng.choice([1, 3, 100])):
            all_taps = [(i, *windows.reach(tap, box)) for i, tap in enumerate(windows.taps)]
            assert [each for each in all_taps if not is_empty(each[1])] == list(windows.reached(box))
    wide = Windows((3,), (10**12,), (1,), ((0, 10**12),), (1,), (4,))
    (box,) = wide.boxes(4)
    assert [i for i, _, _ in wide.reached(box)] == [0, 1, 2]
