"""Llama (Touvron et al. 2023, arXiv:2302.13971; Dubey et al. 2024, arXiv:2407.21783)."""

from __future__ import annotations

import math

import numpy as np

from foreplan.base.arguments import number_in
from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal

EPSILON = 1e-5
INIT = Normal(0.02)
TRAINED = 8192  # positions that the model saw before its rotary embedding was stretched
LOW, HIGH = 1.0, 4.0  # turns within them: slower pairs are stretched in full, faster ones not at all


def frequencies(depth: int, base: float, stretch: float) -> np.ndarray:
    """Angle per position of each of the depth/2 pairs of a head: base^(−2i/depth), slow ones divided by `stretch`.

    Pairs that turn between LOW and HIGH times in TRAINED positions are divided in part, as Llama 3.1 and 3.2 have it.
    """
    plain = base ** (-np.arange(0, depth, 2) / depth)
    kept = np.clip((TRAINED * plain / (2 * math.pi) - LOW) / (HIGH - LOW), 0.0, 1.0)
    return plain * (kept + (1 - kept) / stretch)


def _linear(x: Tensor, features: int, name: str) -> Tensor:
    return nn.linear(x, features, bias=False, name=name, weight_init=INIT)


def self_attention(x: Tensor, heads: int, kv_heads: int, turns: np.ndarray) -> Tensor:
    """Causal attention with rotary embedding; heads/kv_heads neighbouring query heads share keys and values."""
    width = x.shape[-1]
    depth = width // heads
    (q,) = nn.split_heads(_linear(x, width, "q_proj"), heads)
    (k,), (v,) = (nn.split_heads(_linear(x, kv_heads * depth, name), kv_heads) for name in ("k_proj", "v_proj"))
    q, k = (nn.rotary_embedding(each, frequencies=turns, heads_last=True) for each in (q, k))
    return _linear(nn.join_heads(nn.attention(q, k, v, causal=True, heads_last=True)), width, "o_proj")


def block(x: Tensor, heads: int, kv_heads: int, features: int, turns: np.ndarray) -> Tensor:
    """Self-attention and a SwiGLU feed-forward layer (Shazeer 2020), each normalised before and added after."""
    y = nn.rms_norm(x, epsilon=EPSILON, name="input_layernorm")
    with nn.scope("self_attn"):
        x = x + self_attention(y, heads, kv_heads, turns)
    y = nn.rms_norm(x, epsilon=EPSILON, name="post_attention_layernorm")
    with nn.scope("mlp"):
        y = nn.silu(_linear(y, features, "gate_proj")) * _linear(y, features, "up_proj")
        return x + _linear(y, x.shape[-1], "down_proj")


def llama(
    batch: int = 1,
    seq: int = 1024,
    layers: int = 16,
    width: int = 2048,
    heads: int = 32,
    kv_heads: int = 8,
    features: int = 8192,
    vocabulary: int = 128256,
    base: float = 500000.0,
    stretch: float = 32.0,
    tied: bool = True,
) -> Graph:
    """Llama 3.2 1B: `tokens` int64[batch,seq] → `logits` [batch,seq,vocabulary]; 1,235,814,400 parameters.

    Rotary embedding has the base `base`, and is stretched to `stretch` times as many positions; 1.0 leaves it as it
    was until Llama 3. The output matrix is the token embedding if `tied`, else `lm_head.weight`. Names are those of
    Hugging Face. Weights are drawn from N(0, 0.02²).

    Raises:
        UsageError: the heads do not divide the width into even depths, kv_heads does not divide the heads, or the base
            or the stretch is below 1.
    """
    if width % (2 * heads):
        raise UsageError(f"llama: width must be a multiple of 2·heads, {2 * heads}, and is {width}")
    if heads % kv_heads:
        raise UsageError(f"llama: kv_heads must divide heads, {heads}, and is {kv_heads}")
    number_in("llama: base", base, 1.0, math.inf)
    number_in("llama: stretch", stretch, 1.0, math.inf)
    turns = frequencies(width // heads, base, stretch)

    def model(tokens: Tensor) -> dict[str, Tensor]:
        with nn.scope("model"):
            x = nn.embedding(tokens, vocabulary, width, name="embed_tokens", weight_init=INIT)
            for i in range(layers):
                with nn.scope("layers"), nn.scope(i):
                    x = block(x, heads, kv_heads, features, turns)
            x = nn.rms_norm(x, epsilon=EPSILON, name="norm")
        if tied:
            return {"logits": x @ nn.shared("model.embed_tokens.weight").T}
        return {"logits": _linear(x, vocabulary, "lm_head")}

    return trace(model, spec((batch, seq), "int64"), name="llama")
