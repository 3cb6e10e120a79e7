"""The diffusion U-Net of the zoo beside diffusers', with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: make setup-torch")

from foreplan import models  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402

# Of google/ddpm-cifar10-32, but for the widths, the groups and the extent.
CONFIGURATION = {
    "block_out_channels": (8, 16, 16, 16),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "layers_per_block": 2,
    "norm_eps": 1e-6,
    "norm_num_groups": 4,
    "sample_size": 16,
}


def test_ddpm_unet(tmp_path: Path) -> None:
    module = drawn(diffusers.UNet2DModel(**CONFIGURATION))
    rng = np.random.default_rng(1)
    images, noise = rng.standard_normal((2, 2, 3, 16, 16)).astype(np.float32)
    graph = models.ddpm_unet(batch=2, size=16, width=8, groups=4)
    inputs = {"images": images, "timesteps": np.array([3, 987])}
    beside(graph, module, lambda m, x, t: m(x, t).sample, inputs, noise, tmp_path, "mse")
