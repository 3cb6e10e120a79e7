"""ConvNeXt of the zoo beside torchvision's, with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
theirs = pytest.importorskip("torchvision.models.convnext", reason="torchvision is not installed: make setup-torch")

from foreplan import models  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402


@pytest.mark.parametrize("size", [64, 39])
def test_convnext(size: int, tmp_path: Path) -> None:
    """Also where the strides do not divide the extents."""
    widths = (8, 16, 32, 64, None)
    stages = [theirs.CNBlockConfig(*pair, count) for *pair, count in zip(widths, widths[1:], (1, 1, 3, 1))]
    module = drawn(theirs.ConvNeXt(stages, num_classes=5))
    graph = models.convnext_tiny(batch=2, size=size, blocks=1, classes=5, width=8)
    images = np.random.default_rng(2).standard_normal((2, 3, size, size)).astype(np.float32)
    beside(graph, module, lambda m, x: m(x), {"images": images}, np.array([1, 4]), tmp_path)


def test_the_published_model() -> None:
    """Names and shapes of all weights."""
    state = {name: tuple(value.shape) for name, value in theirs.convnext_tiny().state_dict().items()}
    assert {value.name: value.shape for value in models.convnext_tiny().stored} == state
