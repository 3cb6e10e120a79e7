"""Gradients by Winograd's algorithm on the last two axes of three: drawn geometry in depth, beside float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from tests.cpu.check import needs_onednn, run, type_of, ways
from tests.kernels import expected, normal
from tests.profile import pick

pytestmark = needs_onednn()
Drawn = tuple[Conv, np.ndarray, np.ndarray, np.ndarray]


def last(*arrays: np.ndarray) -> list[Window]:
    return [channels_last(type_of(x)) for x in arrays]


def dense(*arrays: np.ndarray) -> list[Window]:
    return [Window.dense(type_of(x)) for x in arrays]


def drawn(seed: int, same: bool) -> Drawn:
    """A convolution, volumes, weights, and the gradient of the result.

    Args:
        same: whether the result has as many slices as the data, each of which some tap meets.
    """
    rng = np.random.default_rng(seed)
    batch, depth, taps = (int(rng.integers(low, high)) for low, high in ((1, 4), (1, 7), (1, 4)))
    inner, outer = (16 * int(rng.integers(1, 3)) for _ in range(2))
    step, gap = (1, 1) if same else (int(rng.integers(1, 3)), int(rng.integers(1, 3)))
    low = taps // 2 if same else int(rng.integers(0, 3))
    high = taps - 1 - low if same else int(rng.integers(0, 3))
    high += max(0, (taps - 1) * gap + 1 - depth - low - high)
    plane = [(int(rng.integers(0, 3)), int(rng.integers(0, 3))) for _ in range(2)]
    extent = tuple(map(int, rng.integers(3, 10, 2)))
    op = Conv((step, 1, 1), ((low, high), *plane), (gap, 1, 1))
    x, w = normal(batch, inner, depth, *extent), normal(outer, inner, taps, 3, 3)
    return op, x, w, normal(*op.infer([type_of(x), type_of(w)])[0].shape)


def exact(op: Op, given: Sequence[np.ndarray], windows: Sequence[Window], over: tuple[int, int] | None = None) -> None:
    """By one thread and by two; near the results of float64."""
    (wanted,) = expected(op, [x.astype(np.float64) for x in given])
    for threads in (1, 2):
        (found,) = run(op, given, windows, over, threads, "winograd")
        assert np.abs(found - wanted).max() <= 5e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("seed", range(pick(2, 6, 60)))
def test_the_gradient_of_its_data(seed: int, add: bool) -> None:
    op, x, w, g = drawn(seed, same=True)
    base = [x] * add
    exact(ConvDataGrad(*op.geometry, spatial=x.shape[2:]), (g, w, *base), [*last(g), *dense(w), *last(*base)])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("seed", range(pick(2, 6, 60)))
def test_the_gradient_of_its_weights(seed: int, add: bool) -> None:
    op, x, w, g = drawn(seed, same=True)
    base, op_of_weights = [w] * add, ConvWeightGrad(*op.geometry, kernel=w.shape[2:])
    if "winograd" not in ways(op_of_weights, [x, g], last(x, g)):
        assert x.shape[2] < w.shape[2]  # some taps meet zeros alone
        return
    exact(op_of_weights, (x, g, *base), [*last(x, g), *dense(*base)])


@pytest.mark.parametrize("seed", range(pick(10, 30, 300)))
def test_any_steps_and_zeros_in_depth_where_there_is_this_way(seed: int) -> None:
    op, x, w, g = drawn(seed, same=False)
    cases = (
        (ConvDataGrad(*op.geometry, spatial=x.shape[2:]), (g, w), [*last(g), *dense(w)]),
        (ConvWeightGrad(*op.geometry, kernel=w.shape[2:]), (x, g), last(x, g)),
    )
    for each, given, windows in cases:
        if "winograd" in ways(each, given, windows):
            exact(each, given, windows)


def test_which_have_this_way() -> None:
    x, w = normal(1, 16, 6, 8, 8), normal(16, 16, 3, 3, 3)
    around, none = ((1, 1),) * 3, ((0, 0),) * 3
    for op, weights, of_data, of_weights in (
        (Conv((1, 1, 1), around, (1, 1, 1)), w, True, True),
        (Conv((1, 1, 1), none, (1, 1, 1)), w, False, True),
        (Conv((2, 1, 1), around, (1, 1, 1)), w, False, True),
        (Conv((1, 2, 1), around, (1, 1, 1)), w, False, False),
        (Conv((1, 1, 1), around, (1, 1, 2)), w, False, False),
        (Conv((1, 1, 1), none, (1, 1, 1)), normal(16, 16, 3, 1, 1), False, False),
        (Conv((1, 1, 1), around, (1, 1, 1)), normal(8, 16, 3, 3, 3), False, False),
    ):
        g = normal(*op.infer([type_of(x), type_of(weights)])[0].shape)
        data = ConvDataGrad(*op.geometry, spatial=x.shape[2:])
        weight = ConvWeightGrad(*op.geometry, kernel=weights.shape[2:])
        assert "winograd" not in ways(op, [x, weights], [*last(x), *dense(weights)])
        assert ("winograd" in ways(data, [g, weights], [*last(g), *dense(weights)])) == of_data, op
        assert ("winograd" in ways(weight, [x, g], last(x, g))) == of_weights, op
