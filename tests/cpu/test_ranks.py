"""Nets over one, two and three spatial axes train on the CPU engine as on NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreplan as fp
from tests.cpu.check import needs_onednn

pytestmark = needs_onednn()
nn = fp.nn


def pointnet(x: Any) -> Any:
    """Points [N, 3, points]: what is done to each alike, the largest over all, classes (Qi et al. 2017)."""
    for features in (16, 16, 48):
        x = nn.silu(nn.batch_norm(nn.conv(x, features, kernel=1)))  # smooth: a ReLU turns at a rounding
    return nn.linear(x.max(axis=2), 5)


def wavenet(x: Any) -> Any:
    """Sound [N, 1, samples]: gated convolutions that see what was before alone, farther and farther back (van den Oord
    et al. 2016).
    """
    x, skipped = nn.conv(x, 8, kernel=1), 0
    for gap in (1, 2, 4):
        seen = nn.conv(x, 16, kernel=2, dilation=gap, padding=[(gap, 0)])
        gated = nn.tanh(seen[:, :8]) * nn.sigmoid(seen[:, 8:])
        skipped = skipped + nn.conv(gated, 12, kernel=1)
        x = x + nn.conv(gated, 8, kernel=1)
    return nn.conv(nn.silu(skipped), 4, kernel=1)


def diffusion_unet(x: Any) -> Any:
    """Images, whose positions attend to each other in the middle, by one-tap convolutions over one axis (Dhariwal and
    Nichol 2021).
    """
    top = nn.silu(nn.group_norm(nn.conv(x, 8, kernel=3, padding=1), groups=2))
    low = nn.silu(nn.conv(top, 16, kernel=3, stride=2, padding=1))
    n, channels, height, width = low.shape
    flat = low.reshape((n, channels, height * width))
    seen = nn.conv(nn.group_norm(flat, groups=4), 3 * channels, kernel=1).transpose((0, 2, 1))
    heads = nn.join_heads(nn.attention(*nn.split_heads(seen, heads=2, parts=3), heads_last=True))
    flat = flat + nn.conv(heads.transpose((0, 2, 1)), channels, kernel=1)
    low = nn.upsample(flat.reshape(low.shape))
    return nn.conv(nn.concat([top, low]), x.shape[1], kernel=3, padding=1)


def mean_square(y: Any) -> Any:
    return (y * y).mean()


def trained(model: Callable[[Any], Any], x: np.ndarray, target: str, steps: int = 3) -> tuple[list[float], fp.Session]:
    """Losses of some steps, and the session."""
    graph = fp.trace(model, fp.spec(x.shape))
    step = fp.compile(graph, loss=mean_square, optimizer=fp.optim.SGD(0.02), target=target)
    session = step.bind(seed=3)
    return [session.step({"x": x}).loss or 0.0 for _ in range(steps)], session


def assert_alike(model: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    """Assert that some steps of training give the same losses and parameters on both engines."""
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    (wanted, theirs), (found, ours) = (trained(model, x, target) for target in ("numpy", "cpu:threads=1"))
    np.testing.assert_allclose(found, wanted, rtol=2e-4)
    for name, array in theirs.parameters.items():
        np.testing.assert_allclose(ours.parameters[name], array, rtol=1e-3, atol=2e-4, err_msg=name)


NETS = {
    "PointNet": (pointnet, (4, 3, 40)),
    "WaveNet": (wavenet, (2, 1, 50)),
    "diffusion U-Net": (diffusion_unet, (2, 3, 12, 8)),
}


@pytest.mark.parametrize("name", NETS)
def test_nets_train_alike_on_both_engines(name: str) -> None:
    assert_alike(*NETS[name])


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_drawn_nets_train_alike_on_both_engines(data: st.DataObject) -> None:
    """Two or three layers over some axes, of which each is a convolution, plain or transposed, and what follows it."""
    draw = data.draw
    axes = draw(st.integers(1, 3), "axes")
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), *(draw(st.integers(3, 9)) for _ in range(axes)))
    layers = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["conv", "conv", "turned"]),
                st.sampled_from([1, 1, 2, 3]),  # taps
                st.sampled_from([1, 2]),  # stride
                st.sampled_from([4, 6, 16]),  # channels
                st.sampled_from([0, 1]),  # zeros behind beyond those before
                st.sampled_from([1, 2]),  # groups
                st.sampled_from(["", "batch norm", "group norm", "residual"]),
            ),
            min_size=2,
            max_size=3,
        ),
        "layers",
    )

    def model(x: Any) -> Any:
        for kind, taps, stride, channels, more, groups, follows in layers:
            groups = groups if x.shape[1] % groups == 0 else 1
            pads = [(taps // 2, taps // 2 + more)] * axes
            if kind == "conv":
                y = nn.conv(x, channels, kernel=taps, stride=stride, padding=pads, groups=groups)
            else:
                y = nn.conv_transpose(x, channels, kernel=taps, stride=stride, groups=groups)
            if follows == "batch norm":
                y = nn.batch_norm(y)
            elif follows == "group norm":
                y = nn.group_norm(y, groups=2)
            elif follows == "residual" and y.shape == x.shape:
                y = x + y
            x = nn.silu(y)
        return nn.conv(x, 3, kernel=1)

    assert_alike(model, shape)
