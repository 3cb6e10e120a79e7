"""Megatron-LM's GPT and its distributed optimizer, as far as memory goes, from its own description of both.

Weights are bf16 and gradients are summed in float32 beside them; each rank keeps its part of float32 weights and of
Adam's two moments. Tokens come first in activations, and flash attention copies them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN, HEADS, LAYERS, VOCABULARY, TOKENS = 4096, 10880, 32, 32, 50432, 2048


class Layer(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm, with biases and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens, batch, _ = x.shape
        qkv = self.qkv(self.first(x)).view(tokens, batch, HEADS, -1)
        q, k, v = (each.permute(1, 2, 0, 3).contiguous() for each in qkv.chunk(3, -1))
        del qkv
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.join(y.permute(2, 0, 1, 3).reshape(tokens, batch, WIDTH))
        x = x + F.dropout(y, 0.1, self.training)
        gate, value = self.up(self.second(x)).chunk(2, -1)
        return x + F.dropout(self.down(F.silu(gate) * value), 0.1, self.training)


class GPT(nn.Module):
    """Of [batch, tokens] the logits, float32 [tokens, batch, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x.transpose(0, 1).contiguous(), 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight).float()


class _CrossEntropy(torch.autograd.Function):
    """Of each token: what is kept are the probabilities, which the gradient is written over."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        lowered = logits - logits.amax(-1, keepdim=True)
        picked = lowered.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        sums = lowered.exp_().sum(-1)
        lowered.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(lowered, target)
        return sums.log() - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        probabilities, _ = ctx.saved_tensors
        return probabilities.mul_(grad.unsqueeze(-1)), None


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    result: Any = _CrossEntropy.apply(logits, target.T)
    return result.mean()


class DistributedOptimizer(torch.optim.Optimizer):
    """Adam of a rank's part: float32 weights and two moments, each a part of all; gradients in float32, for all."""

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: int) -> None:
        super().__init__(list(parameters), {})
        all_ = [parameter for group in self.param_groups for parameter in group["params"]]
        self.sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in all_]
        part = math.ceil(sum(parameter.numel() for parameter in all_) / ranks)
        self.kept = [torch.zeros(part, device=all_[0].device) for _ in range(3)]
        for parameter, sums in zip(all_, self.sums):
            parameter.register_post_accumulate_grad_hook(lambda each, sums=sums: self._add(each, sums))

    def _add(self, parameter: Tensor, sums: Tensor) -> None:
        assert parameter.grad is not None
        sums.add_(parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One fused kernel, without temporaries; narrow weights are written into the sums' bytes and gathered there."""
        weight, first, second = self.kept
        first.add_(weight)
        second.add_(weight)
        for sums in self.sums:
            sums.zero_()
