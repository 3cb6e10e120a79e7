"""The nets that the CPU engine is measured with, each once, as PyTorch's users write or import them.

All contenders run these modules, with the weights that seed 0 gives: foreplan by `from_torch`, ONNX Runtime from
PyTorch's export. Outputs are scores [N, classes] for targets [N], or images for targets of their shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import transformers
from torch import nn
from torch_gpu import Unet
from torch_models import Chain, Mlp

import tests.torch.conftest  # noqa: F401  torchvision may have been built for another PyTorch

Built = tuple[nn.Module, tuple[torch.Tensor, ...], torch.Tensor]


@dataclass(frozen=True)
class Net:
    """A step to measure.

    Attributes:
        build: gives a module, what it is called with, and the target.
        goal: of the ratio of times, ours to the best peer's.
        train: a training step; else the forward pass.
        images: of two axes, which PyTorch may hold with their channels last.
        momentum: of SGD (Nesterov's); 0 for SGD alone.
        budget: of ours, if any.
    """

    build: Callable[[], Built]
    goal: float
    train: bool = True
    images: bool = False
    momentum: float = 0.9
    budget: str | None = None


class Scores(nn.Module):
    """A net's scores as a matrix: of every token, or of every pixel."""

    def __init__(self, net: nn.Module, classes_at: int = -1) -> None:
        super().__init__()
        self.net, self.classes_at = net, classes_at

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        found = self.net(*inputs)
        scores = found if isinstance(found, torch.Tensor) else found.logits
        return scores.movedim(self.classes_at, -1).flatten(0, -2)


class Recurrent(nn.Module):
    """A recurrent layer over sequences [batch, time, 256], and scores of each time."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = layer(256, 256, batch_first=True), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


class Dlrm(nn.Module):
    """DLRM (Naumov et al. 2019): 13 numbers and 26 categories, products of all pairs of vectors."""

    def __init__(self, sparse: bool, rows: int = 10_000, width: int = 16, hidden: int = 512) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width, sparse=sparse) for _ in range(26))
        self.bottom = nn.Sequential(
            nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU()
        )
        self.top = nn.Sequential(nn.Linear(width + 27 * 26 // 2, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1), persistent=False)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([dense, products[:, self.pairs[0] * 27 + self.pairs[1]]], 1))


def convolutions(axes: int) -> nn.Module:
    """Five convolutions with normalisation and pools, over one or three axes."""
    conv, norm, pool = {
        1: (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d),
        3: (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d),
    }[axes]
    parts: list[nn.Module] = []
    channels = 32 if axes == 1 else 3
    for i, filters in enumerate((32, 64, 64, 128, 128)):
        parts += [conv(channels, filters, 3, padding=1, bias=False), norm(filters), nn.ReLU(inplace=True)]
        parts += [pool(2)] if i in (1, 3) else []
        channels = filters
    last = nn.AdaptiveAvgPool1d(1) if axes == 1 else nn.AdaptiveAvgPool3d(1)
    return nn.Sequential(*parts, last, nn.Flatten(), nn.Linear(channels, 10))


def images(net: Callable[[], nn.Module], batch: int, size: int = 224, classes: int = 1000) -> Callable[[], Built]:
    """Images of three channels with a class each."""
    return lambda: (net(), (torch.randn(batch, 3, size, size),), torch.randint(classes, (batch,)))


def tokens(net: Callable[[], nn.Module], batch: int, length: int, vocabulary: int) -> Callable[[], Built]:
    """Tokens with a class each."""

    def build() -> Built:
        given = torch.randint(vocabulary, (batch, length))
        return Scores(net()), (given,), torch.randint(vocabulary, (batch * length,))

    return build


def numbers(net: Callable[[], nn.Module], *shape: int, classes: int = 10, scores: int = 1) -> Callable[[], Built]:
    """Floats with a class for each item, or for each of some `scores` of an item."""
    return lambda: (net(), (torch.randn(shape),), torch.randint(classes, (shape[0] * scores,)))


def chain() -> Built:
    """Nine convolutions, image to image."""
    return Chain(), (torch.randn(1, 1, 256, 256),), torch.randn(1, 1, 256, 256)


def dlrm(sparse: bool) -> Callable[[], Built]:
    """2,048 clicks."""
    return lambda: (
        Dlrm(sparse),
        (torch.randn(2048, 13), torch.randint(10_000, (2048, 26))),
        torch.randint(2, (2048,)),
    )


def gpt2() -> nn.Module:
    """GPT-2 small, of four layers."""
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, **still))


def bert() -> nn.Module:
    """BERT base, of four layers."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=4, **still))


def llama() -> nn.Module:
    """Two blocks of Llama 3.2 1B, with a small vocabulary."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(vocab_size=4096, num_hidden_layers=2, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config)


def _unet() -> Built:
    return Scores(Unet(), 1), (torch.randn(4, 3, 64, 64),), torch.randint(2, (4 * 64 * 64,))


def _of(name: str, **how: Any) -> Callable[[], nn.Module]:
    """A model of torchvision's."""

    def net() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(**how)

    return net


RESNET50, MOBILENET = _of("resnet50"), _of("mobilenet_v2", dropout=0.0)
OF_FOUR = {"image_size": 224, "patch_size": 16, "num_layers": 4, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072}
VIT = _of("VisionTransformer", **OF_FOUR)
NETS = {
    "ResNet-50, 8 images": Net(images(RESNET50, 8), 0.75, images=True),
    "ResNet-50, 8 images, in 460 MiB": Net(images(RESNET50, 8), 0.8, images=True, budget="460MiB"),
    "ResNet-18, 8 images": Net(images(_of("resnet18"), 8), 0.8, images=True),
    "VGG-16, 2 images": Net(images(_of("vgg16", dropout=0.0), 2), 0.8, images=True),
    "MobileNetV2, 8 images": Net(images(MOBILENET, 8), 0.8, images=True),
    "EfficientNet-B0, 4 images": Net(
        images(_of("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0), 4), 0.8, images=True
    ),
    "ConvNeXt-T, 2 images": Net(images(_of("convnext_tiny", stochastic_depth_prob=0.0), 2), 0.8, images=True),
    "U-Net, 4 images of 64²": Net(_unet, 0.8, images=True),
    "chain of nine convolutions, 256²": Net(chain, 0.8, images=True),
    "ViT-B/16 of 4 layers, 4 images": Net(images(VIT, 4), 0.85),
    "GPT-2 of 4 layers, 2 x 256": Net(tokens(gpt2, 2, 256, 50257), 0.85),
    "BERT of 4 layers, 2 x 128": Net(tokens(bert, 2, 128, 30522), 0.8),
    "Llama, 2 blocks, 1 x 256": Net(tokens(llama, 1, 256, 4096), 0.85),
    "MLP, width 1,024, batch 256": Net(numbers(Mlp, 256, 784), 0.85),
    "MLP, width 256, batch 1": Net(numbers(lambda: Mlp(256), 1, 784), 0.8),
    "MLP, width 64, batch 16": Net(numbers(lambda: Mlp(64), 16, 784), 0.2),
    "LSTM, width 256, 32 x 64": Net(
        numbers(lambda: Scores(Recurrent(nn.LSTM)), 32, 64, 256, classes=256, scores=64), 0.7
    ),
    "GRU, width 256, 32 x 64": Net(
        numbers(lambda: Scores(Recurrent(nn.GRU)), 32, 64, 256, classes=256, scores=64), 0.7
    ),
    "1-D convolutions, 16 x 32 x 1,024": Net(numbers(lambda: convolutions(1), 16, 32, 1024), 0.8),
    "3-D convolutions, 2 x 3 x 16 x 56²": Net(numbers(lambda: convolutions(3), 2, 3, 16, 56, 56), 0.8),
    "DLRM, 2,048 clicks": Net(dlrm(False), 0.8),
    "DLRM, 2,048 clicks, sparse SGD": Net(dlrm(True), 0.8, momentum=0.0),
    "inference: ResNet-50, 1 image": Net(images(RESNET50, 1), 0.95, train=False, images=True),
    "inference: ResNet-50, 8 images": Net(images(RESNET50, 8), 0.95, train=False, images=True),
    "inference: MobileNetV2, 1 image": Net(images(MOBILENET, 1), 0.95, train=False, images=True),
    "inference: ViT-B/16 of 4 layers, 1 image": Net(images(VIT, 1), 0.95, train=False),
    "inference: GPT-2 of 4 layers, 1 x 256": Net(tokens(gpt2, 1, 256, 50257), 0.95, train=False),
    "inference: BERT of 4 layers, 1 x 128": Net(tokens(bert, 1, 128, 30522), 0.95, train=False),
}


def built(name: str) -> Built:
    """A net with its inputs and targets, the same each time."""
    torch.manual_seed(0)
    return NETS[name].build()
