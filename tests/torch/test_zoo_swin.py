"""Swin Transformer of the zoo beside torchvision's, with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
theirs = pytest.importorskip(
    "torchvision.models.swin_transformer", reason="torchvision is not installed: make setup-torch"
)

from foreplan import models  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402

INDEX = "relative_position_index"  # a constant of ours


@pytest.mark.parametrize("size", [24, 21])
def test_swin(size: int, tmp_path: Path) -> None:
    """Also where windows do not divide the extents, and where these are odd."""
    depths, heads = [1, 1, 3, 1], [1, 2, 4, 8]
    module = theirs.SwinTransformer([1, 1], 8, depths, heads, [3, 3], stochastic_depth_prob=0.0, num_classes=5)
    graph = models.swin_t(batch=2, size=size, blocks=1, classes=5, width=8, heads=1, window=3, patch=1)
    images = np.random.default_rng(2).standard_normal((2, 3, size, size)).astype(np.float32)
    inputs, target = {"images": images}, np.array([1, 4])
    beside(graph, drawn(module), lambda m, x: m(x), inputs, target, tmp_path, strict=False)


def test_the_published_model() -> None:
    """Names and shapes of all weights."""
    state = {name: tuple(value.shape) for name, value in theirs.swin_t().state_dict().items()}
    parameters = {value.name: value.shape for value in models.swin_t().parameters}
    assert parameters == {name: shape for name, shape in state.items() if not name.endswith(INDEX)}
