"""Convolutions and their gradients by every kernel against NumPy's: geometry, layouts and what follows are drawn."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import foreplan as fp
from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.runtime.cpu.table import family_of
from tests.cpu.check import check, needs_onednn, type_of

pytestmark = needs_onednn()
NEAR = {"rtol": 1e-3, "atol": 1e-3}  # of sums of at most some thousand numbers; Winograd's transforms magnify rounding
MAPS = {  # what is done to a result, and whether each further input is as the result
    "relu(a0)": (),
    "relu((a0 + a1))": (True,),
    "((a0 - a1) * a2)": (False, False),
    "relu((((a0 * a1) + a2) + a3))": (False, False, True),
}


class Case(NamedTuple):
    """Images, weights and the attributes of a convolution that takes them."""

    x: np.ndarray
    w: np.ndarray
    geometry: tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three spatial axes; each has a kernel, a stride, a dilation and paddings of its own."""
    axes = draw(st.integers(1, 3))
    most = (24, 12, 4)[axes - 1]
    plain = draw(st.booleans())  # what products and Winograd's algorithm take: half of all cases, else next to none
    groups = 1 if plain else draw(st.sampled_from((1, 1, 2, 3, 8)))
    channels, results = (groups * draw(st.sampled_from((1, 3, 16) if groups == 1 else (1, 1, 4))) for _ in range(2))
    if groups > 1 and draw(st.booleans()):
        channels = results = groups  # each channel by itself
    alike, extents, kernel, strides, dilations, pads = draw(st.sampled_from((0, 1, 3))), [], [], [], [], []
    for _ in range(axes):
        taps = alike or draw(st.integers(1, 4))
        step, gap = (draw(st.sampled_from((1, 1, 2) if plain else (1, 2, 3))) for _ in range(2))
        gap = 1 if plain else gap
        pad = (0, 0) if taps == 1 and plain else (draw(st.integers(0, 3)), draw(st.integers(0, 3)))
        reach = (taps - 1) * gap + 1
        least = max(1, reach - sum(pad))
        extents.append(draw(st.integers(least, least + most)))
        kernel.append(taps)
        strides.append(step)
        dilations.append(gap)
        pads.append(pad)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.standard_normal((draw(st.integers(1, 3)), channels, *extents), np.float32)
    w = rng.standard_normal((results, channels // groups, *kernel), np.float32)
    return Case(x, w, (tuple(strides), tuple(pads), tuple(dilations), groups))


def lying(data: st.DataObject, *arrays: np.ndarray) -> list[Window]:
    """Tensors in C order, with channels last, or as some of the channels of wider images."""
    windows = []
    for x in arrays:
        window = data.draw(st.sampled_from((Window.dense, channels_last)))(type_of(x))
        if x.ndim > 2 and data.draw(st.booleans()):
            wide = channels_last(window.type.with_shape((x.shape[0], x.shape[1] + 5, *x.shape[2:])))
            window = Window(window.type, wide.strides)
        windows.append(window)
    return windows


def ops_of(case: Case, data: st.DataObject) -> list[tuple[Op, list[np.ndarray]]]:
    """A convolution, with a map, and both gradients, with operands; something is added to some results."""
    x, w, geometry = case
    rng, conv = np.random.default_rng(0), Conv(*geometry)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    g = normal(*conv.infer([type_of(x), type_of(w)])[0].shape)
    added = data.draw(st.sampled_from(((), (w.shape[0],), g.shape)), "added")
    expr, biased, adds = (data.draw(st.sampled_from(found)) for found in (list(MAPS), (False, True), (False, True)))
    further = [normal(*(g.shape if whole else (w.shape[0], *[1] * (g.ndim - 2)))) for whole in MAPS[expr]]
    return [
        (conv, [x, w, *[normal(*added)] * bool(added)]),
        (ConvMap(*geometry, expr, biased), [x, w, *[normal(w.shape[0])] * biased, *further]),
        (ConvDataGrad(*geometry, spatial=x.shape[2:]), [g, w, *[normal(*x.shape)] * adds]),
        (ConvWeightGrad(*geometry, kernel=w.shape[2:]), [x, g, *[normal(*w.shape)] * adds]),
    ]


def is_left_to_numpy(case: Case) -> bool:
    """Images of one position and one channel, on one axis or three: oneDNN has its reference kernel alone for them."""
    results = Conv(*case.geometry).infer([type_of(case.x), type_of(case.w)])[0].shape
    return case.x.ndim != 4 and 1 in (math.prod(case.x.shape[1:]), math.prod(results[1:]))


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_convolutions_of_any_geometry(case: Case, data: st.DataObject) -> None:
    assume(not is_left_to_numpy(case))
    for op, inputs in ops_of(case, data):
        types = [type_of(x) for x in inputs]
        if isinstance(op, ConvMap) and family_of(op, types, op.infer(types), 1) is None:
            continue  # few old instructions: it stays a convolution and a map
        check(op, *inputs, windows=lying(data, *inputs), **NEAR)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_images_of_one_element_are_computed_by_something(axes: int) -> None:
    x = np.full((1, 1, *[1] * axes), 2, np.float32)
    graph = fp.trace(lambda x: fp.nn.conv(x, 4, kernel=3, padding=1), fp.spec(x.shape))
    ours, numpys = (fp.compile(graph, lambda y: (y * y).mean(), target=target) for target in ("cpu:threads=1", "numpy"))
    assert axes == 2 or any("NumPy" in note for note in ours.program.notes)
    results = [step.bind(seed=1).step({"x": x}) for step in (ours, numpys)]
    np.testing.assert_allclose(results[0].loss, results[1].loss, rtol=1e-5)
    for name, gradient in results[1].gradients.items():
        np.testing.assert_allclose(results[0].gradients[name], gradient, rtol=1e-5)


@pytest.mark.parametrize("low", [0, 1, 2])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_unequal_padding_before_and_behind(axes: int, low: int) -> None:
    rng, pads = np.random.default_rng(0), ((low, 2 - low),) * axes
    x, w = rng.standard_normal((2, 4, *[8] * axes), np.float32), rng.standard_normal((6, 4, *[3] * axes), np.float32)
    conv = Conv((2,) * axes, pads, (1,) * axes, 1)
    g = rng.standard_normal(conv.infer([type_of(x), type_of(w)])[0].shape, np.float32)
    check(conv, x, w, **NEAR)
    check(ConvDataGrad(*conv.geometry, spatial=x.shape[2:]), g, w, **NEAR)
    check(ConvWeightGrad(*conv.geometry, kernel=w.shape[2:]), x, g, **NEAR)


def test_steps_where_zeros_lie_behind_alone() -> None:
    """What "same" means where a stride of 2 halves an even extent: an inference and a training step."""
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    graph = fp.trace(lambda x: fp.nn.conv(x, 8, kernel=3, stride=2, padding="same"), fp.spec(x.shape))
    for options in ({}, {"loss": lambda y: (y * y).mean(), "optimizer": fp.optim.SGD(0.1)}):
        theirs, ours = (fp.compile(graph, target=t, **options).bind(seed=1) for t in ("numpy", "cpu:threads=1"))
        wanted, found = (session.step({"x": x}) for session in (theirs, ours))
        if options:
            assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
        for name, array in (wanted.outputs | dict(theirs.parameters)).items():
            both = found.outputs | dict(ours.parameters)
            np.testing.assert_allclose(both[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
