"""Depth-wise convolutions by foreplan's own loops: drawn geometry and epilogues, beside float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import Tensor, nn
from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv
from foreplan.runtime.cpu.instructions import Level, level
from tests.cpu.check import needs_onednn, run, type_of, ways
from tests.kernels import expected, normal
from tests.profile import pick

pytestmark = needs_onednn()
EXPRS = ("clip(a0, 0.0, 6.0)", "(a0 * sigmoid(a0))", "relu(((a0 - a1) * a2))", "(a1 + relu(a0))")


@pytest.fixture(autouse=True)
def with_vectors() -> None:
    if level() < Level.AVX2:
        pytest.skip("needs a processor with AVX2")


def geometry(rng: np.random.Generator) -> tuple[Conv, np.ndarray, np.ndarray]:
    """A convolution of any steps, gaps and zeros; images and weights."""
    channels, taps = int(rng.integers(1, 70)), tuple(map(int, rng.integers(1, 6, 2)))
    steps, gaps = (tuple(map(int, rng.integers(1, 3, 2))) for _ in range(2))
    pads = tuple((int(rng.integers(0, 4)), int(rng.integers(0, 4))) for _ in range(2))
    least = [max(1, (k - 1) * gap + 1 - sum(pad)) for k, gap, pad in zip(taps, gaps, pads)]
    extent = tuple(low + int(rng.integers(0, 14)) for low in least)
    op = Conv(steps, pads, gaps, channels)
    return op, normal(int(rng.integers(1, 4)), channels, *extent), normal(channels, 1, *taps)


def last(x: np.ndarray) -> Window:
    return channels_last(type_of(x))


def dense(x: np.ndarray) -> Window:
    return Window.dense(type_of(x))


def exact(op: Op, given: Sequence[np.ndarray], windows: Sequence[Window], over: tuple[int, int] | None = None) -> None:
    """By one thread and by two; near the results of float64."""
    (wanted,) = expected(op, [x.astype(np.float64) for x in given])
    for threads in (1, 2):
        (found,) = run(op, given, windows, over, threads, "depthwise")
        assert np.abs(found - wanted).max() <= 2e-6 * max(1.0, float(np.abs(wanted).max()))


@pytest.mark.parametrize("added", ["nothing", "bias", "old", "in place"])
@pytest.mark.parametrize("seed", range(pick(4, 15, 200)))
def test_a_convolution(seed: int, added: str) -> None:
    op, x, w = geometry(np.random.default_rng(seed))
    shape = op.infer([type_of(x), type_of(w)])[0].shape
    more = {"nothing": [], "bias": [normal(len(w))]}.get(added, [normal(*shape)])
    windows = [last(x), dense(w), *(dense(z) if added == "bias" else last(z) for z in more)]
    exact(op, [x, w, *more], windows, (0, 2) if added == "in place" else None)


@pytest.mark.parametrize("expr", EXPRS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("seed", range(pick(2, 6, 60)))
def test_any_epilogue(seed: int, biased: bool, expr: str) -> None:
    op, x, w = geometry(np.random.default_rng(seed))
    shape, vector = op.infer([type_of(x), type_of(w)])[0].shape, (len(w), 1, 1)
    whole = [normal(*shape)] if expr.startswith("(a1") else []
    further = whole or [normal(*vector) for _ in range(expr.count("a1") + expr.count("a2"))]
    bias = [normal(len(w))] * biased
    mapped = ConvMap(*op.geometry, expr, biased)
    windows = [last(x), dense(w), *map(dense, bias), *(last(z) if whole else dense(z) for z in further)]
    exact(mapped, [x, w, *bias, *further], windows)


def test_what_only_resembles_it_goes_other_ways() -> None:
    x = normal(1, 16, 8, 8)
    plain = Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 16)
    assert "depthwise" in ways(plain, [x, normal(16, 1, 3, 3)], [last(x), dense(normal(16, 1, 3, 3))])
    for groups, w in ((8, normal(16, 2, 3, 3)), (16, normal(32, 1, 3, 3)), (16, normal(16, 1, 8, 8))):
        op = Conv((1, 1), ((1, 1), (1, 1)), (1, 1), groups)
        assert "depthwise" not in ways(op, [x, w], [last(x), dense(w)])


def test_activations_are_part_of_the_convolutions_before_them() -> None:
    """Of MobileNet: the clip behind convolutions of one tap and depth-wise ones; others keep their normalisation."""

    def model(x: Tensor) -> Tensor:
        for i, (features, kernel, groups) in enumerate(((32, 3, 1), (64, 1, 1), (64, 3, 64))):
            x = nn.conv(x, features, kernel, padding=kernel // 2, groups=groups, bias=False, name=f"conv{i}")
            x = np.clip(nn.batch_norm(x, name=f"norm{i}"), 0.0, 6.0)
        return x

    graph = fp.trace(model, fp.spec((1, 16, 14, 14)), name="activated")
    program = fp.compile(graph, target="cpu:threads=1").program
    mapped = {call.node.partition("/")[0]: call.op.expr for call in program.calls if isinstance(call.op, ConvMap)}
    assert set(mapped) == {"conv0", "conv1", "conv2"}
    assert {name for name, expr in mapped.items() if "clip" in expr} == {"conv1", "conv2"}
    assert all("a3" in expr for expr in mapped.values())
    data = {"x": np.random.default_rng(0).normal(size=(1, 16, 14, 14)).astype(np.float32)}
    found, wanted = (
        next(iter(fp.compile(graph, target=target).bind(seed=1).step(data).outputs.values()))
        for target in ("cpu:threads=1", "numpy")
    )
    assert np.abs(found - wanted).max() < 2e-5
