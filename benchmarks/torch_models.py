"""Models of the benchmarks in PyTorch, as PyTorch's users write them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS = (1, 256, 128, 64, 32, 16, 8, 4, 2, 1)


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(CHANNELS)))


class Mlp(nn.Sequential):
    def __init__(self, width: int = 1024, layers: int = 4) -> None:
        parts: list[nn.Module] = []
        for i in range(layers):
            parts += [nn.Linear(width if i else 784, width), nn.ReLU()]
        super().__init__(*parts, nn.Linear(width, 10))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.attn(self.ln_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return F.linear(self.ln(self.blocks(x)), self.wte.weight)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.down = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.down(x), inplace=True)


class ResNet50(nn.Sequential):
    def __init__(self) -> None:
        parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        parts.append(nn.MaxPool2d(3, 2, 1))
        inputs = 64
        for i, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            for j in range(count):
                parts.append(Bottleneck(inputs, width, 2 if i and not j else 1))
                inputs = 4 * width
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model of the benchmark and its inputs: `resnet50:batch=8`, say."""
    base, _, text = name.partition(":")
    sizes = {key: int(value) for key, _, value in (part.partition("=") for part in text.split(",") if part)}
    batch = sizes.pop("batch", 0)
    if base == "resnet50":
        return ResNet50(), (torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,)))
    if base == "conv_chain":
        size = sizes.pop("size", 1024)
        return Chain(), (torch.randn(1, 1, size, size), torch.randn(1, 1, size, size))
    if base == "mlp":
        batch = batch or 256
        return Mlp(**sizes), (torch.randn(batch, 784), torch.randint(10, (batch,)))
    seq = sizes.pop("seq", 1024)
    tokens = torch.randint(50257, (batch, seq))
    return Gpt2(**sizes), (tokens, tokens.roll(-1, 1).reshape(-1))
