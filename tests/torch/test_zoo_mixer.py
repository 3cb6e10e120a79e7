"""The Mixer of the zoo beside timm's, with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
timm = pytest.importorskip("timm.models.mlp_mixer", reason="timm is not installed: make setup-torch")

from foreplan import models  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402


def test_mixer(tmp_path: Path) -> None:
    sizes = {"num_classes": 5, "img_size": 24, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
    module = drawn(timm.MlpMixer(**sizes))
    rng = np.random.default_rng(1)
    images = rng.standard_normal((3, 3, 24, 24)).astype(np.float32)
    graph = models.mixer_b16(batch=3, size=24, layers=2, classes=5, width=32, patch=8)
    beside(graph, module, lambda m, x: m(x), {"images": images}, rng.integers(0, 5, 3), tmp_path)
