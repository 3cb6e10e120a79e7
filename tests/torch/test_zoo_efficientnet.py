"""EfficientNet of the zoo beside torchvision's, with the same weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
theirs = pytest.importorskip("torchvision.models.efficientnet", reason="torchvision is not installed: make setup-torch")

from foreplan import models  # noqa: E402
from foreplan.graph import parse_graph  # noqa: E402
from foreplan.models.efficientnet import STAGES  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402


def test_efficientnet(tmp_path: Path) -> None:
    """In float64: the gradient of a bias in front of a batch norm is 0 but for rounding."""
    config = partial(theirs.MBConvConfig, width_mult=0.25, depth_mult=0.3)
    before = (32, *(channels for *_, channels, _ in STAGES))
    stages = [config(up, kernel, stride, n, m, blocks) for (up, kernel, stride, m, blocks), n in zip(STAGES, before)]
    module = drawn(theirs.EfficientNet(stages, dropout=0.0, stochastic_depth_prob=0.0, num_classes=5)).double()
    graph = models.efficientnet_b0(batch=2, size=64, classes=5, width=0.25, depth=0.3)
    graph = parse_graph(graph.as_text().replace("float32", "float64"))
    images = np.random.default_rng(2).standard_normal((2, 3, 64, 64))
    beside(graph, module, lambda m, x: m(x), {"images": images}, np.array([1, 4]), tmp_path)


def test_the_published_model() -> None:
    """Names and shapes of all weights and running statistics."""
    state = {name: tuple(value.shape) for name, value in theirs.efficientnet_b0().state_dict().items() if value.ndim}
    ours = {value.name: value.shape for value in models.efficientnet_b0().stored}
    assert ours == state
