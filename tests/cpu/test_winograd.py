"""Winograd's convolutions and their gradients against sums of products, over awkward shapes; and how exact they are."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import FLOAT32
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.runtime.cpu.kernel import CpuKernel
from foreplan.runtime.cpu.kernels import winograd
from foreplan.runtime.cpu.threads import set_threads
from tests.cpu.check import check, laid_out, needs_onednn, scratch, type_of, ways

pytestmark = needs_onednn()

# batch, channels in and out, extent, zeros (above, below), (left, right)
CASES = [
    (1, 16, 16, (4, 4), ((1, 1), (1, 1))),
    (2, 32, 48, (7, 9), ((1, 1), (1, 1))),
    (3, 16, 32, (13, 6), ((0, 0), (0, 0))),
    (1, 48, 16, (3, 3), ((1, 1), (1, 1))),
    (2, 16, 16, (5, 11), ((2, 1), (0, 2))),
    (2, 64, 32, (33, 30), ((1, 1), (1, 1))),
]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def image(*shape: int) -> Window:
    return channels_last(TensorType(FLOAT32, shape))


def correlated(x: np.ndarray, w: np.ndarray, pads: tuple[tuple[int, int], tuple[int, int]]) -> np.ndarray:
    """The convolution in float64, tap by tap."""
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *pads))
    rows, columns = x.shape[2] - 2, x.shape[3] - 2
    taps = [(r, s) for r in range(3) for s in range(3)]
    return sum(np.einsum("nchw,kc->nkhw", x[:, :, r : r + rows, s : s + columns], w[:, :, r, s]) for r, s in taps)


def weight_gradient(x: np.ndarray, g: np.ndarray, pads: tuple[tuple[int, int], tuple[int, int]]) -> np.ndarray:
    x, (rows, columns) = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *pads)), g.shape[2:]
    found = [
        [np.einsum("nchw,nkhw->kc", x[:, :, r : r + rows, s : s + columns], g) for s in range(3)] for r in range(3)
    ]
    return np.moveaxis(np.array(found), (0, 1), (2, 3))


def run(kernel: CpuKernel, inputs: list[np.ndarray], windows: list[Window], out: Window, over: int = -1) -> np.ndarray:
    """What a kernel gives twice over, its memory poisoned."""
    arrays = [laid_out(x, window) for x, window in zip(inputs, windows)]
    y = arrays[over] if over >= 0 else laid_out(np.full(out.shape, 77, np.float32), out)
    memory = scratch(kernel.workspace)
    call = kernel.bind(arrays, [y], memory)
    call()
    first = y.copy()
    if over < 0:
        memory[...] = 0x7F
        call()
        assert np.array_equal(first, y)
    return first


def near(ours: np.ndarray, exact: np.ndarray) -> None:
    assert np.abs(ours - exact).max() <= 2e-5 * np.abs(exact).max()


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> int:
    set_threads(request.param)
    return int(request.param)


@pytest.mark.parametrize("added", ["nothing", "bias", "old", "in place"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_convolution(case: tuple, added: str) -> None:  # type: ignore[type-arg]
    batch, inner, outer, extent, pads = case
    x, w = normal(batch, inner, *extent), normal(outer, inner, 3, 3)
    exact = correlated(x, w, pads)
    images = added in ("old", "in place")
    more = [] if added == "nothing" else [normal(*exact.shape) if images else normal(outer)]
    windows = [image(*x.shape), Window.dense(type_of(w))]
    windows += [image(*exact.shape) if images else Window.dense(type_of(m)) for m in more]
    after = [("old" if images else "add", 2)] if more else []
    before = pads[0][0], pads[1][0]
    kernel = winograd.Convolution(windows[0], windows[1], image(*exact.shape), before, turned=False, after=after)
    total = exact + (more[0] if images else more[0][:, None, None] if more else 0)
    over = 2 if added == "in place" else -1
    near(run(kernel, [x, w, *more], windows, image(*exact.shape), over), total)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_its_data(case: tuple) -> None:  # type: ignore[type-arg]
    batch, inner, outer, extent, pads = case
    x, w = normal(batch, inner, *extent), normal(outer, inner, 3, 3)
    g = normal(*correlated(x, w, pads).shape)
    around = [(2 - low, 2 - high) for low, high in pads]
    exact = correlated(g, np.moveaxis(w, 0, 1)[:, :, ::-1, ::-1], (around[0], around[1]))
    assert exact.shape == x.shape
    before = around[0][0], around[1][0]
    windows = [image(*g.shape), Window.dense(type_of(w))]
    kernel = winograd.Convolution(*windows, image(*x.shape), before, turned=True)
    near(run(kernel, [g, w], windows, image(*x.shape)), exact)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_its_weights(case: tuple, add: bool) -> None:  # type: ignore[type-arg]
    batch, inner, outer, extent, pads = case
    x, w = normal(batch, inner, *extent), normal(outer, inner, 3, 3)
    g = normal(*correlated(x, w, pads).shape)
    exact = weight_gradient(x, g, pads) + (w if add else 0)
    windows = [image(*x.shape), image(*g.shape), Window.dense(type_of(w))]
    kernel = winograd.WeightGradient(*windows, (pads[0][0], pads[1][0]), add=add)
    near(run(kernel, [x, g, w], windows, windows[2]), exact)


def test_tiles_in_several_blocks_and_ranges_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images whose channels are some of more, weights that are a range of columns; blocks of a few tiles."""
    monkeypatch.setattr(winograd, "LEAST", 5)
    monkeypatch.setattr(winograd, "MOST", 5)
    x, w = normal(3, 16, 14, 13), normal(32, 16, 3, 3)
    wide = Window(type_of(x), (14 * 13 * 48 * 4, 4, 13 * 48 * 4, 48 * 4))
    columns = Window(type_of(w), (40 * 9 * 4, 9 * 4, 3 * 4, 4))
    exact = correlated(x, w, ((1, 1), (1, 1)))
    kernel = winograd.Convolution(wide, columns, image(*exact.shape), (1, 1), turned=False)
    assert len(list(kernel.blocks)) > 2 and kernel.blocks.count % kernel.blocks.most
    near(run(kernel, [x, w], [wide, columns], image(*exact.shape)), exact)
    windows = [wide, image(*exact.shape), columns]
    g = normal(*exact.shape)
    kernel = winograd.WeightGradient(*windows, (1, 1), add=False)
    near(run(kernel, [x, g, w], windows, columns), weight_gradient(x, g, ((1, 1), (1, 1))))


def test_the_ops_have_this_way() -> None:
    geometry = ((1, 1), ((1, 1), (1, 1)), (1, 1))
    x, w, g = normal(1, 64, 56, 56), normal(64, 64, 3, 3), normal(1, 64, 56, 56)
    assert ways(Conv(*geometry), [x, w]) == ["winograd", "onednn"]
    check(Conv(*geometry), x, w, normal(64), rtol=1e-3, atol=1e-3)
    check(ConvDataGrad(*geometry, spatial=(56, 56)), g, w, normal(*x.shape), rtol=1e-3, atol=1e-3)
    check(ConvWeightGrad(*geometry, kernel=(3, 3)), x, g, normal(*w.shape), rtol=1e-3, atol=3e-3)
    for strides, taps, channels in (((2, 2), (3, 3), 64), ((1, 1), (5, 5), 64), ((1, 1), (3, 3), 60)):
        odd = Conv(strides, *geometry[1:])
        assert ways(odd, [normal(1, channels, 56, 56), normal(64, channels, *taps)]) == ["onednn"]
