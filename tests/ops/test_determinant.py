"""Determinants and cumulative products. NumPy judges values, differences judge gradients."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import GraphBuilder, TensorType, as_dtype
from foreplan.ops.determinant import det
from foreplan.ops.reduce import reduce
from foreplan.ops.scan import cumprod
from tests.ops.check import built, check_vjp
from tests.profile import few

rng = np.random.default_rng(3)


@pytest.mark.parametrize(
    "shape", few([*zip([(1, 1), (2, 2), (3, 2, 2), (3, 3), (2, 4, 4), (2, 3, 6, 6), (20, 20)])], range(6))
)
def test_determinants(shape: tuple[int, ...]) -> None:
    x = rng.standard_normal(shape)
    (found,) = built(det, x)
    np.testing.assert_allclose(found, np.linalg.det(x), rtol=1e-9)
    if shape[-1] < 7:
        check_vjp(det, x)


def test_a_permutation_has_its_sign_and_a_singular_matrix_none() -> None:
    order = np.eye(5)[[4, 0, 3, 1, 2]]
    (found,) = built(det, np.stack([order, np.ones((5, 5)), np.zeros((5, 5))]))
    np.testing.assert_allclose(found, [np.linalg.det(order), 0, 0], atol=1e-12)


def test_the_gradient_of_a_small_singular_matrix_is_that_of_its_cofactors() -> None:
    check_vjp(det, np.array([[1.0, 2, 3], [2, 4, 6], [1, 0, 1]]))


def test_what_has_no_determinant_is_told() -> None:
    b = GraphBuilder()
    with pytest.raises(ShapeError, match="square"):
        det(b, b.input("x", TensorType(as_dtype("float32"), (2, 3))))
    with pytest.raises(UnsupportedError, match="64 at most"):
        det(b, b.input("y", TensorType(as_dtype("float32"), (65, 65))))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_cumulative_products(axis: int, exclusive: bool, reverse: bool) -> None:
    x = rng.standard_normal((4, 7))
    x[1, 2] = x[0, 0] = x[3, 2] = 0
    walked = np.flip(x, axis) if reverse else x
    wanted = np.cumprod(walked, axis)
    if exclusive:
        wanted = np.insert(wanted, 0, 1, axis).take(range(x.shape[axis]), axis)
    (found,) = built(lambda b, v: cumprod(b, v, axis, exclusive, reverse), x)
    np.testing.assert_allclose(found, np.flip(wanted, axis) if reverse else wanted, rtol=1e-12)
    check_vjp(lambda b, v: cumprod(b, v, axis, exclusive, reverse), x)


@pytest.mark.parametrize("axes", [(1,), (0, 2), None])
def test_the_gradient_of_a_product_is_right_where_elements_are_zero(axes: tuple[int, ...] | None) -> None:
    """With no zero, one, and two along the axes."""
    x = rng.standard_normal((3, 4, 2))
    x[1, 2, 0] = x[0, 0, 1] = x[0, 1, 1] = 0
    check_vjp(lambda b, v: reduce(b, "prod", v, axes), x)
