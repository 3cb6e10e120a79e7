"""litgpt's decoder with LoRA, written anew from what its sources do: one product makes queries, keys and values, and
one adapter serves queries and values. It differs from transformers' in what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Of a decoder.

    Attributes:
        rotated: share of each head that is rotated.
        gated: RMS norms and a gated layer, as Llama has them; else layer norms, biases and GELU, side by side with
            attention.
        shared: attention and the feed-forward layer read the same norm.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    rotated: float = 1.0
    gated: bool = True
    shared: bool = False


class RMSNorm(nn.Module):
    """In float32, and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * scaled).to(x.dtype)


class Adapted(nn.Linear):
    """A product for queries, keys and values, of which queries and values have an adapter of rank 8."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, 3 * width, bias)
        self.down = nn.Parameter(torch.empty(16, width))
        self.up = nn.Parameter(torch.empty(2 * width, 8))
        self.register_buffer("places", torch.cat([torch.arange(width), torch.arange(2 * width, 3 * width)]), False)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.dropout(x, 0.05, self.training), self.down)
        y = F.conv1d(low.transpose(-2, -1), self.up.unsqueeze(-1), groups=2).transpose(-2, -1)
        y = y.transpose(0, 1)
        zeros = y.new_zeros((*y.shape[:-1], self.out_features)).view(-1, self.out_features)
        wide = zeros.index_copy(1, self.places, y.reshape(-1, y.shape[-1]))
        del zeros
        wide = wide.view(*y.shape[:-1], self.out_features).transpose(0, 1) * 2.0
        return super().forward(x) + wide


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * cos + turned * sin).to(x.dtype)


class Layer(nn.Module):
    """Of litgpt's decoder."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, bias = sizes, not sizes.gated
        norm = RMSNorm if sizes.gated else nn.LayerNorm
        self.first, self.second = norm(sizes.width), None if sizes.shared else norm(sizes.width)
        self.attention, self.join = Adapted(sizes.width, bias), nn.Linear(sizes.width, sizes.width, bias)
        self.up = nn.ModuleList(nn.Linear(sizes.width, sizes.hidden, bias) for _ in range(1 + sizes.gated))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.first(x)
        y = self.attend(first, cos, sin)
        if self.sizes.gated:
            x = y + x
            return self.feed(self.second(x)) + x
        return self.feed(first if self.second is None else self.second(x)) + y + x

    def feed(self, x: Tensor) -> Tensor:
        if not self.sizes.gated:
            return self.down(F.gelu(self.up[0](x)))
        gate, value = (up(x) for up in self.up)
        return self.down(F.silu(gate) * value)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.attention(x).view(batch, tokens, self.sizes.heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (each.reshape(batch, self.sizes.heads, tokens, -1) for each in qkv.split(1, 2))
        n = cos.shape[-1]
        q = torch.cat((rotate(q[..., :n], cos, sin), q[..., n:]), -1)
        k = torch.cat((rotate(k[..., :n], cos, sin), k[..., n:]), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.join(y.transpose(1, 2).reshape(batch, tokens, width))


class LitGPT(nn.Module):
    """litgpt's decoder with its adapters; logits in pieces of 128 tokens, each with a loss of its own."""

    def __init__(self, sizes: Sizes, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = (RMSNorm if sizes.gated else nn.LayerNorm)(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=sizes.shared)
        for name in ("cos", "sin"):
            rotated = int(sizes.width // sizes.heads * sizes.rotated)
            self.register_buffer(name, torch.empty(sequence, rotated), persistent=False)
        self.to(torch.bfloat16).requires_grad_(False)
        for layer in self.layers:
            layer.attention.down.requires_grad_(True)
            layer.attention.up.requires_grad_(True)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return [self.head(each) for each in self.norm(x).split(128, dim=1)]


def loss_in_pieces(logits: list[Tensor], target: Tensor) -> Tensor:
    """The mean over all tokens."""
    pieces = zip(logits, target.split(128, dim=1))
    losses = [F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1), reduction="none") for x, y in pieces]
    return torch.cat(losses).mean()
