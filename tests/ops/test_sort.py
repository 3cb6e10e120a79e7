"""Extremes and order against NumPy's argmax and stable argsort, and ONNX's rules for ties."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder
from foreplan.ops.sort import ArgReduce, TopK, arg_reduce, top_k
from tests.ops.check import check_vjp, run_op, type_of

RNG = np.random.default_rng(0)
DTYPES = ["float32", "float64", "int64", "uint64", "int32", "uint8", "bool"]


def sample(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers with many ties; of 64-bit integers also ones that a float64 cannot tell apart."""
    x = RNG.integers(0, 6, shape)
    if dtype in ("int64", "uint64"):
        x = x + RNG.choice([0, (1 << 62) + 1, (1 << 21) - 1], shape)
    if dtype not in ("uint64", "uint8", "bool"):
        x = x * RNG.choice([-1, 1], shape)
    x = x.astype(dtype)
    if dtype == "uint64":
        x += RNG.choice(np.array([0, 1 << 63], np.uint64), shape)
    return x


def order(x: np.ndarray, axis: int, largest: bool) -> np.ndarray:
    """Positions in order, ties by position: Python's own sort of each row, which is stable."""

    def row(values: np.ndarray) -> list[int]:
        return sorted(range(len(values)), key=lambda i: -values[i].item() if largest else values[i].item())

    return np.apply_along_axis(row, axis, x)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_no_rows_give_no_elements(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    axis = shape.index(3)
    values, indices = run_op(TopK(2, axis), x)
    assert values.size == indices.size == 0 and values.shape[axis] == 2
    assert run_op(ArgReduce("max", axis), x)[0].size == 0


@pytest.mark.parametrize("largest", [False, True])
def test_the_largest_numbers_are_told_apart(largest: bool) -> None:
    top = np.finfo(np.float64).max
    x = np.array([0.9, 0.6, -0.9, 0.7, -0.8, 1.0]) * top
    np.testing.assert_array_equal(run_op(TopK(6, 0, largest), x)[1], order(x, 0, largest))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,axis", [((7,), 0), ((3, 9), 1), ((9, 3), 0), ((2, 11, 3), 1)])
def test_top_k(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    x = sample(shape, dtype)
    for k in (0, 1, 4, shape[axis]):
        for largest in (True, False):
            values, indices = run_op(TopK(k, axis, largest), x)
            wanted = order(x, axis, largest).take(range(k), axis)
            np.testing.assert_array_equal(indices, wanted)
            np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, axis))


def test_top_k_across_blocks_and_infinities() -> None:
    x = RNG.standard_normal((3, 5000, 2)).astype(np.float32)
    x[:, RNG.choice(5000, 50), :] = -np.inf
    x[:, RNG.choice(5000, 5), :] = np.inf
    values, indices = run_op(TopK(4990, 1), x)
    wanted = np.argsort(-x, axis=1, kind="stable")[:, :4990]
    np.testing.assert_array_equal(indices, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["max", "min"])
@pytest.mark.parametrize("shape,axis", [((7,), 0), ((3, 9), 1), ((9, 3), 0), ((2, 11, 3), 1), ((2, 6000, 3), 1)])
def test_arg_reduce(how: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    x = sample(shape, dtype)
    find = np.argmax if how == "max" else np.argmin
    (first,) = run_op(ArgReduce(how, axis), x)
    np.testing.assert_array_equal(first, find(x, axis))
    (last,) = run_op(ArgReduce(how, axis, True, True), x)
    np.testing.assert_array_equal(last, x.shape[axis] - 1 - find(np.flip(x, axis), axis, keepdims=True))


def test_gradient_goes_to_the_chosen_elements() -> None:
    x = RNG.permutation(24).reshape(2, 4, 3) * 0.5
    check_vjp(lambda b, x: top_k(b, x, 2, 1)[0], x)
    check_vjp(lambda b, x: top_k(b, x, 3, largest=False)[0], x)


def test_refuses_what_is_not_there() -> None:
    b = GraphBuilder()
    x = b.input("x", type_of(np.zeros((2, 3))))
    with pytest.raises(ShapeError, match="cannot take 4 elements"):
        top_k(b, x, 4)
    with pytest.raises(ShapeError, match="not distinct axes"):
        arg_reduce(b, "max", x, 2)
    with pytest.raises(ValueError, match="must be max or min"):
        ArgReduce("most", 0)
