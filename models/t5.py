"""T5 (Raffel et al. 2020, arXiv:1910.10683)."""

from __future__ import annotations

import math

import numpy as np

from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal

BUCKETS, FARTHEST = 32, 128  # kinds of distance, and the distance from which on all are of one kind


def position_buckets(queries: int, keys: int, causal: bool) -> np.ndarray:
    """The kind of distance from each query to each key: integers below BUCKETS, [queries, keys].

    Short distances have a bucket each, longer ones share buckets whose width grows in proportion to the distance.
    Keys behind the query have buckets of their own; with `causal` there are none, and the others get all buckets.
    """
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    count = BUCKETS if causal else BUCKETS // 2
    offset = 0 if causal else count * (distance > 0)
    distance = np.maximum(-distance, 0) if causal else np.abs(distance)
    exact = count // 2
    logarithm = np.log(np.maximum(distance, 1) / exact) / math.log(FARTHEST / exact)
    wide = np.minimum(exact + (logarithm * (count - exact)).astype(np.int64), count - 1)
    return offset + np.where(distance < exact, distance, wide)


def _linear(x: Tensor, features: int, name: str, std: float) -> Tensor:
    return nn.linear(x, features, bias=False, name=name, weight_init=Normal(std))


def attention(
    x: Tensor, context: Tensor, heads: int, depth: int, bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    """From positions of `x` to those of the context; scores are not scaled, which the queries' first weights make up
    for.
    """
    width, inner = x.shape[-1], heads * depth
    (q,) = nn.split_heads(_linear(x, inner, "q", (width * depth) ** -0.5), heads)
    (k,), (v,) = (nn.split_heads(_linear(context, inner, name, width**-0.5), heads) for name in ("k", "v"))
    y = nn.attention(q, k, v, bias, causal=causal, scale=1.0, heads_last=True)
    return _linear(nn.join_heads(y), width, "o", inner**-0.5)


def position_bias(length: int, width: int, heads: int, causal: bool) -> Tensor:
    """A number for each head and distance, added to the scores of all layers: [1, heads, length, length]."""
    buckets = position_buckets(length, length, causal)
    table = nn.parameter("relative_attention_bias.weight", (BUCKETS, heads), Normal(width**-0.5))
    return table[buckets].transpose(2, 0, 1).reshape(1, heads, length, length)


def feed_forward(x: Tensor, features: int, dropout: float) -> Tensor:
    """Two matrices with a ReLU between them."""
    width = x.shape[-1]
    y = nn.dropout(nn.relu(_linear(x, features, "wi", width**-0.5)), dropout)
    return _linear(y, width, "wo", features**-0.5)


def stack(
    x: Tensor, context: Tensor | None, layers: int, heads: int, depth: int, features: int, dropout: float
) -> Tensor:
    """The encoder, or with a context the decoder: each part is normalised before and added after."""
    causal, bias, x = context is not None, None, nn.dropout(x, dropout)
    for i in range(layers):
        with nn.scope("block"), nn.scope(i), nn.scope("layer"):
            with nn.scope(0):
                y = nn.rms_norm(x, name="layer_norm")
                with nn.scope("SelfAttention"):
                    if bias is None:
                        bias = position_bias(x.shape[1], x.shape[2], heads, causal)
                    y = attention(y, y, heads, depth, bias, causal)
                x = x + nn.dropout(y, dropout)
            if context is not None:
                with nn.scope(1):
                    y = nn.rms_norm(x, name="layer_norm")
                    with nn.scope("EncDecAttention"):
                        y = attention(y, context, heads, depth)
                    x = x + nn.dropout(y, dropout)
            with nn.scope(1 if context is None else 2):
                y = nn.rms_norm(x, name="layer_norm")
                with nn.scope("DenseReluDense"):
                    y = feed_forward(y, features, dropout)
                x = x + nn.dropout(y, dropout)
    return nn.dropout(nn.rms_norm(x, name="final_layer_norm"), dropout)


def t5_small(
    batch: int = 8,
    seq: int = 512,
    decoder_seq: int = 114,
    layers: int = 6,
    width: int = 512,
    heads: int = 8,
    depth: int = 64,
    features: int = 2048,
    vocabulary: int = 32128,
    dropout: float = 0.0,
) -> Graph:
    """T5 small: `tokens` int64[batch,seq], `decoder_tokens` int64[batch,decoder_seq] → `logits`
    [batch,decoder_seq,vocabulary]; 60,506,624 parameters.

    `layers` are those of the encoder, and as many of the decoder. One embedding serves both and, times 1/√width, the
    output. Names and first weights are those of Hugging Face, whose model drops out a tenth (dropout=0.1). Every
    position of the input attends to every other: batches are not padded. Targets of -100 do not count.
    """

    def model(tokens: Tensor, decoder_tokens: Tensor) -> dict[str, Tensor]:
        sizes = (layers, heads, depth, features, dropout)
        x = nn.embedding(tokens, vocabulary, width, name="shared")
        table = nn.shared("shared.weight")
        with nn.scope("encoder"):
            context = stack(x, None, *sizes)
        with nn.scope("decoder"):
            x = stack(table[decoder_tokens], context, *sizes)
        return {"logits": (x * width**-0.5) @ table.T}

    return trace(model, spec((batch, seq), "int64"), spec((batch, decoder_seq), "int64"), name="t5_small")
