"""Convolutions on the CPU engine: of drawn geometry, with maps of their results, and where NumPy's kernel runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import DType, TensorType, Window, as_dtype
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import FLOAT32
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.primitives import OLD, After
from foreplan.runtime.cpu.table import family_of
from foreplan.runtime.kernel import Refused
from tests.cpu.check import THREADS, check, needs_onednn, type_of, ways
from tests.engines.engine import Engine, in_both_types
from tests.kernels import normal
from tests.profile import pick
from tests.sweep.judges import judge_draws

pytestmark = needs_onednn()
NEAR = {"rtol": 1e-3, "atol": 1e-3}  # Winograd's transforms magnify rounding


@pytest.mark.parametrize("name", ["conv", "conv_map", "conv_data_grad", "conv_weight_grad"])
def test_convolutions_of_any_geometry(name: str) -> None:
    """More of them than of other ops: what runs one depends on it in many ways."""
    judge_draws("cpu", name, pick(4, 30, 120))


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


MAPS = {  # what is done to a result, and whether each further input is whole
    "relu(a0)": [],
    "relu(((((a0 - a1) * a2) + a3) + a4))": [False, False, False, True],
    "((a0 + a1) * a2)": [True, False],
}
MAP_CASES = [
    # batch, channels, extent, results, taps, stride: a product, a convolution of one tap, others, of few positions, and
    # by Winograd
    (2, 32, (8, 8), 16, 1, 1),
    (3, 32, (9, 8), 16, 1, 2),
    (3, 16, (24, 23), 24, 1, 1),
    (2, 16, (12, 11), 20, 3, 2),
    (1, 3, (20, 20), 8, 5, 1),
    (2, 20, (6, 5), 100, 3, 1),
    (1, 64, (56, 56), 64, 3, 1),
]

LONG = "relu(((((a0 - a1) * a2) + a3) + a4))"


def stays_apart(op: ConvMap, inputs: Sequence[np.ndarray]) -> bool:
    """Whether no kernel has a convolution with its map here; both by themselves have one."""
    types = [type_of(x) for x in inputs]
    if family_of(op, types, op.infer(types), THREADS) is not None:
        return False
    (own,) = op.conv.infer(types[: op.own])
    assert family_of(op.conv, types[: op.own], [own], THREADS) is not None
    return True


def convolved(case: tuple[Any, ...], expr: str, biased: bool = False) -> tuple[ConvMap, list[np.ndarray]]:
    """A convolution with a map of its result, and its operands."""
    batch, channels, extent, results, taps, stride = case
    op = ConvMap((stride,) * 2, ((taps // 2, taps // 2),) * 2, (1, 1), 1, expr, biased)
    own = [normal(batch, channels, *extent), normal(results, channels, taps, taps), *[normal(results)] * biased]
    (y,) = op.conv.infer([type_of(x) for x in own])
    further = [normal(*(y.shape if whole else (results, 1, 1)), seed=i) for i, whole in enumerate(MAPS[expr])]
    return op, [*own, *further]


@in_both_types("cpu")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("expr", MAPS)
@pytest.mark.parametrize("case", MAP_CASES, ids=str)
def test_convolutions_with_maps_of_their_results(
    engine: Engine, case: tuple[Any, ...], expr: str, biased: bool
) -> None:
    op, given = convolved(case, expr, biased)
    inputs = engine.given(op, given)[0]
    # oneDNN may have nothing but a loop over single numbers for both together: then they stay two.
    may = case == MAP_CASES[4] or not adds_images_late(as_dtype(inputs[0].dtype))
    if expr == LONG and may and stays_apart(op, inputs):
        return
    engine.check(op, *given, **NEAR)
    if True in MAPS[expr]:
        windows = [(channels_last if x.ndim == 4 and i != 1 else Window.dense)(type_of(x)) for i, x in enumerate(given)]
        engine.check(op, *given, windows=windows, over=(0, op.own + MAPS[expr].index(True)), **NEAR)


@in_both_types("cpu")
@pytest.mark.parametrize("case", MAP_CASES, ids=str)
def test_relu_after_a_convolution_keeps_nan(engine: Engine, case: tuple[Any, ...]) -> None:
    op, given = convolved(case, "relu(a0)")
    given[0][0, 0, 0, 0] = np.nan
    (y,) = engine.run(op, given)
    assert np.isnan(y[0, :, 0, 0]).all() and not np.isnan(y[0, :, -1, -1]).any()


def test_few_positions_of_several_taps_are_gathered_for_a_product() -> None:
    op, x, w = Conv((2, 2), ((1, 1), (1, 1)), (1, 1), 1), normal(1, 30, 14, 14), normal(96, 30, 3, 3)
    last = Window(type_of(x), (14 * 14 * 160, 4, 14 * 160, 160))  # of 40 channels
    windows = [last, Window.dense(type_of(w))]
    assert "columns" in ways(op, [x, w], windows)
    check(op, x, w, windows=windows, rtol=1e-4, atol=1e-4)
    assert "columns" not in ways(op, [x, w[:49]])  # weights are as few as what is gathered
    program = fp.compile(fp.models.build("resnet18:batch=1"), target="cpu:threads=1").program
    chosen = [
        call.op.infer([x.type for x in call.inputs])[0].shape for call in program.calls if call.kernel == "columns"
    ]
    assert chosen == [(1, 512, 7, 7)] * (4 if adds_images_late() else 2)


def adds_images_late(dtype: DType = FLOAT32) -> bool:
    """Whether oneDNN's products add a tensor to what normalisation has made of a result: with AVX-512."""
    matrix = Window.dense(TensorType(dtype, (32, 32)))
    vector = Window.dense(type_of(normal(1, 32)))
    try:
        primitives.matmul(matrix, matrix, matrix, [After("mul", vector), After(OLD)])
    except Refused:
        return False
    return True
