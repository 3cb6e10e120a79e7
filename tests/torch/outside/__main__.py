"""`python -m tests.torch.outside [WORD ...]`: judge modules of transformers, timm, torchvision and diffusers.

All kinds of models of each library, or those whose name has one of the words; each as small as its library makes it.
The verdicts and a table of their counts go to benchmarks/results/torch-outside.json and to the screen. All of them take
two hours on one core.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.profile import SHORT, searching_by
from tests.torch import conftest  # noqa: F401 -- lets torchvision be imported
from tests.torch.outside import small
from tests.torch.outside.judge import Verdict, judge, without_draws

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "torch-outside.json"
MOST_PARAMETERS = 30_000_000
KINDS = ("right", "right in float64", "drawn", "refused", "not exported", "wrong")
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def from_transformers() -> Iterator[tuple[str, Callable[[], Made]]]:
    """One model of each type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def make(model_type: str) -> Made:
        kind = CONFIG_MAPPING[model_type]
        config = kind(**small.small(kind))
        for each in small.classes(model_type):
            module = each(config)
            return module, (), small.inputs(module, config)
        raise ValueError("no model of its own")

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


def main() -> None:
    """Judge, one module after the other; what is known of the others stays."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    words = sys.argv[1:]
    for draw in (from_transformers, from_timm, from_torchvision, from_diffusers):
        for name, make in draw():
            if words and not any(word in name for word in words):
                continue
            started = time.perf_counter()
            try:
                torch.manual_seed(0)
                module, args, kwargs = make()
                if sum(p.numel() for p in module.parameters()) > MOST_PARAMETERS:
                    raise ValueError("it is too large")
                module = without_draws(module)
                module(*args, **kwargs)
                module.load_state_dict(module.state_dict())
            except Exception:  # this drawing has no such model, which says nothing of foreplan
                continue
            try:
                with searching_by(SHORT):
                    found = judge(module, args, kwargs)
            except Exception as error:  # anything but a refusal is a defect
                found = Verdict("wrong", f"{type(error).__name__}: {error}"[:300])
            known[name] = {"kind": found.kind, "why": found.why}
            print(f"{name}: {found.kind} {found.why} ({time.perf_counter() - started:.0f} s)", flush=True)
            RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    print(as_table(known))


def as_table(known: dict[str, dict[str, str]]) -> str:
    """How many modules of each library have each verdict."""
    counts = {library: Counter[str]() for library in sorted({name.partition("/")[0] for name in known})}
    for name, found in known.items():
        counts[name.partition("/")[0]][found["kind"]] += 1
    lines = ["| library | modules | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 2) + "|"]
    for library, each in (counts | {"all": sum(counts.values(), Counter[str]())}).items():
        lines.append(f"| {library} | {each.total()} | " + " | ".join(str(each[kind]) for kind in KINDS) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
