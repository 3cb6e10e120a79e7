"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math

from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal

POSITIONS = 1024  # of the published model; longer sequences enlarge the table


def _linear(x: Tensor, features: int, name: str, std: float = 0.02) -> Tensor:
    return nn.linear(x, features, name=name, weight_init=Normal(std), bias_init=0.0)


def block(x: Tensor, heads: int, residual_std: float, dropout: float) -> Tensor:
    """Causal self-attention and a feed-forward layer, each normalised before and added after."""
    width = x.shape[-1]
    y = nn.layer_norm(x, name="ln_1")
    with nn.scope("attn"):
        q, k, v = nn.split_heads(_linear(y, 3 * width, "c_attn"), heads, 3)
        y = nn.join_heads(nn.attention(q, k, v, causal=True, heads_last=True))
        x = x + nn.dropout(_linear(y, width, "c_proj", residual_std), dropout)
    y = nn.layer_norm(x, name="ln_2")
    with nn.scope("mlp"):
        y = nn.gelu(_linear(y, 4 * width, "c_fc"), approximate="tanh")
        return x + nn.dropout(_linear(y, width, "c_proj", residual_std), dropout)


def gpt2_small(
    batch: int = 4,
    seq: int = 1024,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    dropout: float = 0.0,
) -> Graph:
    """GPT-2 small: `tokens` int64[batch,seq] → `logits` [batch,seq,vocabulary]; 124,439,808 parameters.

    The output matrix is the token embedding. Weights are drawn from N(0, 0.02²), those that end a residual branch from
    N(0, 0.02² / (2·layers)). Dropout stands after the embeddings and at the end of residual branches.
    """
    residual_std = 0.02 / math.sqrt(2 * layers)

    def model(tokens: Tensor) -> dict[str, Tensor]:
        x = nn.embedding(tokens, vocabulary, width, name="wte", weight_init=Normal(0.02))
        x = x + nn.parameter("wpe.weight", (max(POSITIONS, seq), width), Normal(0.02))[:seq]
        x = nn.dropout(x, dropout)
        for i in range(layers):
            with nn.scope("h"), nn.scope(i):
                x = block(x, heads, residual_std, dropout)
        x = nn.layer_norm(x, name="ln_f")
        return {"logits": x @ nn.shared("wte.weight").T}

    return trace(model, spec((batch, seq), "int64"), name="gpt2_small")
