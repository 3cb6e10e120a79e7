"""Models of transformers, timm, torchvision and diffusers, each as small as its library makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.torch import conftest  # noqa: F401 -- lets torchvision be imported
from tests.torch.outside import small
from tests.torch.outside.written.network import Made


def from_transformers() -> Iterator[tuple[str, Callable[[], Made]]]:
    """One model of each type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def make(model_type: str) -> Made:
        kind = CONFIG_MAPPING[model_type]
        config = kind(**small.small(kind))
        for each in small.classes(model_type):
            try:
                with torch.device("meta"):  # some keep their size, which their configurations do not tell
                    small.check_size(each(config))
                module = each(config)
                given = small.inputs(module, config)
                module(**given)
                return module, (), given
            except Exception:  # a model with a head may ask for more than one without
                continue
        raise ValueError("no model that this configuration and these inputs suffice for")

    for model_type in CONFIG_MAPPING:
        yield f"transformers/{model_type}", lambda model_type=model_type: make(model_type)


def from_timm() -> Iterator[tuple[str, Callable[[], Made]]]:
    """The smallest model of each of timm's files."""
    import timm

    def make(names: list[str]) -> Made:
        for size in (64, 96, 128, 224, 256):
            for options in ({"img_size": size}, {}):
                for name in names[:3]:
                    try:
                        module = timm.create_model(name, pretrained=False, num_classes=7, **options)
                        with torch.no_grad():
                            module.eval()(torch.randn(1, 3, size, size))
                        return module, (torch.randn(4, 3, size, size),), {}
                    except (AssertionError, RuntimeError, TypeError, ValueError):
                        continue
        raise ValueError("no size of images that it takes")

    for family in timm.list_modules():
        names = sorted(timm.list_models(module=family), key=lambda name: ("tiny" not in name, "18" not in name, name))
        if names:
            yield f"timm/{family}", lambda names=names: make(names)


def from_torchvision() -> Iterator[tuple[str, Callable[[], Made]]]:
    """The first model of each file, of classification, segmentation, video and flow."""
    from torchvision import models

    def make(name: str, file: str) -> Made:
        options = {} if "optical_flow" in file else {"num_classes": 5}
        if "segmentation" in file:
            options["weights_backbone"] = None  # type: ignore[assignment]
        module = models.get_model(name, weights=None, **options)
        if "optical_flow" in file:
            return module, (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)), {}
        size = 299 if "inception" in name else 224 if name.startswith(("vit", "maxvit")) else 64
        shape = (2, 3, 16, 112, 112) if "video" in file else (4, 3, size, size)
        return module, (torch.randn(*shape),), {}

    seen: set[str] = set()
    for name in models.list_models():
        file = models.get_model_builder(name).__module__
        if file not in seen and not any(part in file for part in ("quantization", "detection")):
            seen.add(file)
            yield f"torchvision/{name}", lambda name=name, file=file: make(name, file)


def from_diffusers() -> Iterator[tuple[str, Callable[[], Made]]]:
    """A model of each kind: networks over images, over images and words, an autoencoder, transformers."""
    import diffusers as d

    image, times = torch.randn(2, 4, 8, 8), torch.tensor([3, 7])
    blocks: dict[str, Any] = {"layers_per_block": 1, "block_out_channels": (32, 32), "norm_num_groups": 8}
    heads: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    yield (
        "diffusers/UNet2DModel",
        lambda: (
            d.UNet2DModel(
                **blocks,
                sample_size=8,
                in_channels=4,
                out_channels=4,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            ),
            (image, times),
            {},
        ),
    )
    yield (
        "diffusers/UNet2DConditionModel",
        lambda: (
            d.UNet2DConditionModel(
                **blocks,
                sample_size=8,
                cross_attention_dim=16,
                attention_head_dim=4,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            ),
            (image, times, torch.randn(2, 6, 16)),
            {},
        ),
    )
    yield (
        "diffusers/AutoencoderKL",
        lambda: (d.AutoencoderKL(block_out_channels=(16,), norm_num_groups=4), (torch.randn(2, 3, 8, 8),), {}),
    )
    yield (
        "diffusers/DiTTransformer2DModel",
        lambda: (
            d.DiTTransformer2DModel(**heads, sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10),
            (image, times, torch.tensor([1, 2])),
            {},
        ),
    )
    yield (
        "diffusers/SD3Transformer2DModel",
        lambda: (
            d.SD3Transformer2DModel(
                **heads,
                sample_size=8,
                in_channels=4,
                out_channels=4,
                joint_attention_dim=16,
                caption_projection_dim=16,
                pooled_projection_dim=12,
            ),
            (),
            {
                "hidden_states": image,
                "encoder_hidden_states": torch.randn(2, 5, 16),
                "pooled_projections": torch.randn(2, 12),
                "timestep": times,
            },
        ),
    )
    yield (
        "diffusers/FluxTransformer2DModel",
        lambda: (
            d.FluxTransformer2DModel(
                **heads,
                in_channels=4,
                num_single_layers=1,
                joint_attention_dim=16,
                pooled_projection_dim=12,
                axes_dims_rope=(2, 2, 4),
            ),
            (),
            {
                "hidden_states": torch.randn(2, 16, 4),
                "encoder_hidden_states": torch.randn(2, 5, 16),
                "pooled_projections": torch.randn(2, 12),
                "timestep": times / 10,
                "img_ids": torch.randn(16, 3),
                "txt_ids": torch.zeros(5, 3),
            },
        ),
    )
