"""Winograd's convolutions and their gradients over awkward shapes: how exact they are beside float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.window import Pads
from foreplan.runtime.cpu import table
from foreplan.runtime.cpu.gemm import tiles
from foreplan.runtime.cpu.kernels import winograd
from tests.cpu.check import check, needs_onednn, run, type_of, ways
from tests.cpu.products import summed
from tests.kernels import as_images, dense, expected, normal

pytestmark = needs_onednn()

# Batch, channels in and out, extent, zeros (above, below), (left, right).
Case = tuple[int, int, int, tuple[int, int], Pads]
CASES: list[Case] = [
    (1, 16, 16, (4, 4), ((1, 1), (1, 1))),
    (2, 32, 48, (7, 9), ((1, 1), (1, 1))),
    (3, 16, 32, (13, 6), ((0, 0), (0, 0))),
    (1, 48, 16, (3, 3), ((1, 1), (1, 1))),
    (2, 16, 16, (5, 11), ((2, 1), (0, 2))),
    (2, 64, 32, (33, 30), ((1, 1), (1, 1))),
]


def operands(case: Case) -> tuple[Conv, np.ndarray, np.ndarray, np.ndarray]:
    """A convolution, images, weights, and the gradient of the result."""
    batch, inner, outer, extent, pads = case
    op, x, w = Conv((1, 1), pads, (1, 1)), normal(batch, inner, *extent), normal(outer, inner, 3, 3)
    return op, x, w, normal(*op.infer([type_of(x), type_of(w)])[0].shape)


def exact(
    op: Op,
    *given: np.ndarray,
    windows: Sequence[Window],
    threads: int = 1,
    over: tuple[int, int] | None = None,
) -> None:
    """Assert that results are near those of float64."""
    (found,) = run(op, given, windows, over, threads, "winograd")
    (wanted,) = expected(op, [x.astype(np.float64) for x in given])
    assert np.abs(found - wanted).max() <= 5e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("added", ["nothing", "bias", "old", "in place"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_convolution(case: Case, added: str, threads: int) -> None:
    op, x, w, g = operands(case)
    more = {"nothing": [], "bias": [normal(len(w))]}.get(added, [g])
    windows = [*as_images(x), *dense(w), *as_images(*more)]
    exact(op, x, w, *more, windows=windows, threads=threads, over=(0, 2) if added == "in place" else None)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_its_data(case: Case, threads: int) -> None:
    op, x, w, g = operands(case)
    data = ConvDataGrad(*op.geometry, spatial=x.shape[2:])
    exact(data, g, w, windows=[*as_images(g), *dense(w)], threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_its_weights(case: Case, add: bool, threads: int) -> None:
    op, x, w, g = operands(case)
    base = [w] * add
    weight = ConvWeightGrad(*op.geometry, kernel=(3, 3))
    exact(weight, x, g, *base, windows=[*as_images(x, g), *dense(*base)], threads=threads)


def sums(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    """A convolution, and the gradients of its data and weights, as sums in float32 that are written out. NumPy's
    libraries sum in other ways on other processors.
    """
    (batch, _, height, width), (outputs, inputs, *_) = x.shape, w.shape

    def columns(images: np.ndarray) -> np.ndarray:
        padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
        taps = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        return np.ascontiguousarray(taps.transpose(0, 2, 3, 1, 4, 5)).reshape(batch * height * width, -1)

    def convolved(images: np.ndarray, weights: np.ndarray) -> np.ndarray:
        flat = summed(columns(images), weights.reshape(len(weights), -1).T)
        return flat.reshape(batch, height, width, -1).transpose(0, 3, 1, 2)

    turned = w.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]
    weights = summed(columns(x).T, g.transpose(0, 2, 3, 1).reshape(-1, outputs))
    return [convolved(x, w), convolved(g, turned), weights.T.reshape(outputs, inputs, 3, 3)]


@cache
def right(batch: int, channels: int, extent: int) -> list[tuple[Op, Sequence[np.ndarray], list[Window], Any, Any]]:
    """A convolution and its gradients with what they take, where it lies, its sums in float32 and in float64."""
    op, x, w, g = operands((batch, channels, channels, (extent, extent), ((1, 1), (1, 1))))
    x = np.maximum(x, 0)
    data, weight = ConvDataGrad(*op.geometry, spatial=(extent, extent)), ConvWeightGrad(*op.geometry, kernel=(3, 3))
    draws: list[tuple[Op, Sequence[np.ndarray], list[Window]]] = [
        (op, (x, w), [*as_images(x), *dense(w)]),
        (data, (g, w), [*as_images(g), *dense(w)]),
        (weight, (x, g), as_images(x, g)),
    ]
    exact = [expected(each, [array.astype(np.float64) for array in given])[0] for each, given, _ in draws]
    return [(*draw, *sums) for draw, *sums in zip(draws, sums(x, w, g), exact, strict=True)]


# Images, channels of each side, and extents as in residual networks and VGG. With the points of Lavin and Gray, norms
# are up to ten times those of sums, and the largest error is up to 30 times theirs.
@pytest.mark.parametrize("case", [(2, 64, 56), (4, 256, 14), (4, 512, 7)], ids=str)
@pytest.mark.parametrize("registers", ["tiles", "vectors"])
def test_errors_are_a_few_times_those_of_sums(
    case: tuple[int, int, int], registers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if registers == "vectors":
        monkeypatch.setattr(tiles, "available", lambda: False)
    norm, most = (3.5, 6) if tiles.available() else (5.5, 11)
    table._make.cache_clear()
    for each, given, windows, theirs, true in right(*case):
        (ours,) = run(each, given, windows, None, 1, "winograd")
        assert np.linalg.norm(ours - true) <= norm * np.linalg.norm(theirs - true)
        assert np.abs(ours - true).max() <= most * np.abs(theirs - true).max()
    table._make.cache_clear()


def test_tiles_in_several_blocks_and_ranges_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images whose channels are some of more, weights that are a range of columns; blocks of a few tiles."""
    monkeypatch.setattr(winograd, "LEAST", 5)
    monkeypatch.setattr(winograd, "MOST", 5)
    table._make.cache_clear()
    op, x, w, g = operands((3, 16, 32, (14, 13), ((1, 1), (1, 1))))
    wide = Window(type_of(x), (14 * 13 * 48 * 4, 4, 13 * 48 * 4, 48 * 4))
    columns = Window(type_of(w), (40 * 9 * 4, 9 * 4, 3 * 4, 4))
    kernel = table.kernels_for(op, [wide, columns], [channels_last(type_of(g))], 1)["winograd"]
    assert len(list(kernel.blocks)) > 2 and kernel.blocks.count % kernel.blocks.most
    exact(op, x, w, windows=[wide, columns])
    weight = ConvWeightGrad(*op.geometry, kernel=(3, 3))
    exact(weight, x, g, w, windows=[wide, *as_images(g), columns])
    table._make.cache_clear()


def test_the_ops_have_this_way() -> None:
    op, x, w, g = operands((1, 64, 64, (56, 56), ((1, 1), (1, 1))))
    assert ways(op, [x, w]) == ["winograd", "onednn"]
    check(op, x, w, normal(64), rtol=1e-3, atol=1e-3)
    check(ConvDataGrad(*op.geometry, spatial=(56, 56)), g, w, normal(*x.shape), rtol=1e-3, atol=1e-3)
    check(ConvWeightGrad(*op.geometry, kernel=(3, 3)), x, g, normal(*w.shape), rtol=1e-3, atol=3e-3)
    for strides, taps, channels in (((2, 2), (3, 3), 64), ((1, 1), (5, 5), 64), ((1, 1), (3, 3), 60)):
        odd = Conv(strides, *op.geometry[1:])
        assert ways(odd, [normal(1, channels, 56, 56), normal(64, channels, *taps)]) == ["onednn"]
