"""Gradients of reductions against differences, long sums, and axes; tests/sweep draws the numbers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder, TensorType, as_dtype
from foreplan.ops.reduce import Reduce, normalize_axes, reduce
from foreplan.ops.shape import sum_to_shape
from tests.ops.check import built, check_vjp, evaluate, run_op, type_of

NUMPY = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "max": np.max, "min": np.min}
AXES = [axes for n in (1, 2, 3) for axes in combinations(range(3), n)]


@pytest.mark.parametrize("how", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("axes", AXES)
def test_differences(how: str, axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).permutation(24).reshape(2, 3, 4) * 0.1
    check_vjp(lambda b, v: reduce(b, how, v, axes), x)
    check_vjp(lambda b, v: reduce(b, how, v, axes, keepdims=True), x)


def test_ties_share_the_cotangent() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorType(as_dtype("float64"), (4,)))
    y = reduce(b, "max", x)
    g = b.input("g", y.type)
    (dx,) = Reduce("max", (0,)).vjp(b, [x], [y], [g])
    assert dx is not None
    found = evaluate(b.finish({"dx": dx}), {"x": np.array([1.0, 3, 3, 0]), "g": np.array(2.0)})
    np.testing.assert_array_equal(found[dx], [0, 1, 1, 0])


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((200_000, 3), (0,)),
        ((3, 100_000, 2), (0, 1)),
        ((70_000, 2, 3), (0, 2)),
        ((400, 2, 500), (0, 2)),
        ((300_000,), (0,)),
    ],
)
def test_many_terms_add_up_exactly_enough(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).random(shape, dtype=np.float32)
    for how in ("sum", "mean"):
        expected = NUMPY[how](x, axis=axes, dtype=np.float64)
        np.testing.assert_allclose(run_op(Reduce(how, axes), x)[0], expected, rtol=2e-6)


def test_axes_as_users_write_them() -> None:
    assert normalize_axes(None, 3) == (0, 1, 2)
    assert normalize_axes(-1, 3) == (2,)
    assert normalize_axes([-1, 0], 3) == (0, 2)
    for wrong in ([0, 0], [3], [-4], [1, -2]):
        with pytest.raises(ShapeError, match="distinct axes"):
            normalize_axes(wrong, 3)
    b = GraphBuilder()
    x = b.input("x", TensorType(as_dtype("float32"), (2, 3)))
    assert reduce(b, "sum", x, []) is x


@pytest.mark.parametrize("shape", [(4,), (3, 1), (1, 4), (1, 1), (3, 4), (1,), (), (1, 3, 4)])
def test_sum_to_shape_is_the_adjoint_of_broadcasting(shape: tuple[int, ...]) -> None:
    full = (2, 3, 4) if len(shape) < 3 else (5, 3, 4)
    x = np.random.default_rng(0).standard_normal(full)
    (got,) = built(lambda b, x: sum_to_shape(b, x, shape), x)
    assert got.shape == shape
    t = np.random.default_rng(1).standard_normal(shape)
    np.testing.assert_allclose((got * t).sum(), (x * np.broadcast_to(t, full)).sum())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_mean_of_nothing_is_no_number_and_has_a_gradient_of_no_elements(dtype: str) -> None:
    x = np.zeros((3, 0, 2), dtype)
    np.testing.assert_array_equal(run_op(Reduce("mean", (1,)), x)[0], np.full((3, 2), np.nan, dtype))
    check_vjp(lambda b, v: reduce(b, "mean", v, 1), np.zeros((3, 0, 2)))
    for how in ("max", "min"):
        with pytest.raises(ShapeError, match="no elements"):
            Reduce(how, (1,)).infer([type_of(x)])
        assert run_op(Reduce(how, (0,)), x)[0].shape == (0, 2)


def test_what_does_not_fit_is_refused() -> None:
    x = TensorType(as_dtype("float32"), (2, 3))
    for axes in ((1, 0), (0, 0), (2,), (-1,)):
        with pytest.raises(ShapeError, match="ascending"):
            Reduce("sum", axes).infer([x])
    with pytest.raises(ValueError, match="how must be"):
        Reduce("median", (0,))
