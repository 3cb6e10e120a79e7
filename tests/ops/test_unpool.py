"""Elements put where they were taken from."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder, TensorType, as_dtype
from foreplan.ops.pool import max_pool_places
from foreplan.ops.unpool import col2im, placed
from tests.ops.check import built, check_vjp


def test_windows_are_added_up_by_the_adjoint_of_taking_them() -> None:
    """<col2im(x), y> = <x, windows of y>, with windows that overlap, gaps and padding."""
    rng = np.random.default_rng(0)
    image, kernel, positions = (5, 6), (2, 3), (3, 4)  # of windows two rows apart, dilated by two in columns
    x, y = rng.standard_normal((2, 3 * 6, 12)), rng.standard_normal((2, 3, *image))
    geometry = {"strides": (2, 1), "pads": ((1, 0), (1, 1)), "dilations": (1, 2)}
    (found,) = built(lambda b, v: col2im(b, v, image, kernel, **geometry), x)
    padded = np.pad(y, ((0, 0), (0, 0), (1, 0), (1, 1)))
    taken = np.stack(
        [padded[:, :, i : i + 5 : 2, j : j + 4] for i in range(2) for j in (0, 2, 4)], 2
    )  # [2, 3, 6, 3, 4]
    assert taken.shape[3:] == positions
    np.testing.assert_allclose((found * y).sum(), (x.reshape(taken.shape) * taken).sum(), rtol=1e-12)
    check_vjp(lambda b, v: col2im(b, v, image, kernel, **geometry), x)


@pytest.mark.parametrize("stride", [1, 2])
def test_maxima_go_back_to_their_places_once(stride: int) -> None:
    x = np.random.default_rng(1).permutation(2 * 3 * 36).reshape(2, 3, 6, 6) - 50.0

    def both(b, v):  # type: ignore[no-untyped-def]
        y, at = max_pool_places(b, v, 2, strides=stride)
        return [at, placed(b, y, at, x.shape, shared=stride == 1)]

    at, found = built(both, x)
    wanted = np.zeros(x.size)
    wanted[at.reshape(-1)] = x.reshape(-1)[at.reshape(-1)]
    np.testing.assert_array_equal(found, wanted.reshape(x.shape))
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), (2, 3))[:, :, ::stride, ::stride]
    np.testing.assert_array_equal(x.reshape(-1)[at], windows.max((4, 5)))
    check_vjp(lambda b, v: both(b, v)[1], x)


def test_windows_that_do_not_fit_are_told() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorType(as_dtype("float32"), (1, 8, 5)))
    with pytest.raises(ShapeError, match="4 windows of 4"):
        col2im(b, x, (3, 3), (2, 2))
