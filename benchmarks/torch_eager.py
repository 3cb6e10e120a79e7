"""What a training step takes in eager PyTorch: asked, counted by foreplan, and measured here on a CPU.

    python -m benchmarks.torch_eager

Measured is the most MiB of live tensors in the third step, Nesterov momentum, float32, on the device `meta`, where
tensors have storages without bytes, with the attention that PyTorch takes on CPUs. Asked are the figures of PyTorch
2.13 in `tests/eager/measured.py`, which the count is to be within 3 % of. While a dispatch mode looks on, as here,
PyTorch sums gradients in new tensors, which it does in place otherwise; the column "watched" counts that too. Writes
`results/pytorch-eager.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import foreplan as fp
from foreplan.eager import Variant, as_pytorch
from tests.eager.measured import MEASURED
from tests.torch.alive import phases

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch_gpu
import torch_models

MIB = 2**20
RESULT = Path(__file__).resolve().parent / "results" / "pytorch-eager.md"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, joined: bool) -> None:
        super().__init__()
        self.heads = heads
        parts = [nn.Linear(width, 3 * width)] if joined else [nn.Linear(width, width) for _ in range(3)]
        self.parts, self.out = nn.ModuleList(parts), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [each for part in self.parts for each in part(x).split(x.shape[-1], -1)]
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Of BERT, which normalises behind the sum, or of ViT, which normalises before."""

    def __init__(self, width: int, heads: int, before: bool) -> None:
        super().__init__()
        self.before, self.attention = before, Attention(width, heads, joined=before)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in zip(self.norms, (self.attention, self.mlp)):
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return x


class Bert(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, vocabulary: int = 30522) -> None:
        super().__init__()
        self.word, self.position, self.segment = (nn.Embedding(n, width) for n in (vocabulary, 512, 2))
        self.norm, self.blocks = nn.LayerNorm(width), nn.Sequential(*(Block(width, 12, False) for _ in range(layers)))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens) + self.position.weight[: tokens.shape[1]] + self.segment(segments)
        return F.linear(self.head(self.blocks(self.norm(x))), self.word.weight, self.bias)


class Vit(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (224 // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, 12, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Inverted(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden, self.adds = inputs * expansion, stride == 1 and inputs == outputs
        parts = [] if expansion == 1 else [normed(inputs, hidden, 1, 1, 1)]
        parts += [normed(hidden, hidden, 3, stride, hidden)]
        self.conv = nn.Sequential(*parts, nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


def normed(inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))


def mobilenet() -> nn.Module:
    """MobileNetV2."""
    from foreplan.models.mobilenet import STAGES

    parts, inputs = [normed(3, 32, 3, 2, 1)], 32
    for expansion, outputs, count, stride in STAGES:
        for i in range(count):
            parts.append(Inverted(inputs, outputs, 1 if i else stride, expansion))
            inputs = outputs
    head = [normed(inputs, 1280, 1, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*parts, *head)


def resnet101() -> nn.Module:
    """ResNet-101: the benchmark's ResNet-50 with more blocks in its third stage."""
    model = torch_models.ResNet50()
    parts = list(model.children())
    return nn.Sequential(*parts[:17], *(torch_models.Bottleneck(1024, 256, 1) for _ in range(17)), *parts[17:])


def images(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))


def pair(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], torch.Tensor]:
    """The model, its inputs and its target."""
    if name.startswith("bert"):
        return Bert(), (torch.randint(9, (8, 512)), torch.randint(2, (8, 512))), torch.randint(9, (8, 512))
    others: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "resnet101": (resnet101, 20),
        "vit_b16": (Vit, 32),
        "mobilenet_v2": (mobilenet, 32),
    }
    if (base := name.partition(":")[0]) in others:
        make, batch = others[base]
        x, target = images(batch)
        return make(), (x,), target
    model, x, target = torch_gpu.build(name)
    return model, (x,), target


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> Any:
    """What PyTorch takes on a CPU; on `meta` it would write attention out."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[0]


def loss_of(name: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """Of a case: the mean of the chain's output, cross-entropy elsewhere."""
    if name == "conv_chain":
        return lambda y, target: y.mean()
    return lambda y, target: (
        F.cross_entropy(y.flatten(0, -2), target.flatten()) if y.dim() == 3 else F.cross_entropy(y, target)
    )


def measured(name: str) -> list[tuple[int, int]]:
    """Of each phase: bytes alive at its end, and the most within it."""
    with torch.device("meta"):
        model, inputs, target = pair(name)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9, nesterov=True)
    return phases(model, inputs, None if name == "conv_chain" else target, loss_of(name), optimizer)


def row(name: str, asked: int) -> str:
    """Of the table: MiB asked, counted and measured, and how far the count is off both."""
    graph = fp.models.build(name)
    loss = "mean" if name == "conv_chain" else "cross_entropy"
    how = (graph, loss, fp.optim.Nesterov(0.1), Variant(), False)
    counted, watched = (as_pytorch(*how, watched=each).peak / MIB for each in (False, True))
    found = max(most for _, most in measured(name)[-3:]) / MIB
    off = [f"{a / b - 1:+.2%}".replace("-", "−") for a, b in ((counted, asked), (watched, found))]
    line = f"| `{name}` | {asked:,} | {counted:,.2f} | {off[0]} | {watched:,.2f} | {found:,.2f} | {off[1]} |"
    print(line, flush=True)
    return line


def main() -> None:
    """The table."""
    F.scaled_dot_product_attention = attention
    head = ["| model, MiB | asked | counted | off | watched | measured | off |", "|---|---|---|---|---|---|---|"]
    print("\n".join(head))
    rows = [row(name, asked) for name, asked in MEASURED.items()]
    about = (
        f"PyTorch {torch.__version__}, steady state, float32, Nesterov momentum; `python -m benchmarks.torch_eager`."
    )
    RESULT.write_text("\n".join([about, "", *head, *rows]) + "\n")


if __name__ == "__main__":
    main()
