"""BERT (Devlin et al. 2019) with its masked-language-model head, or with one that classifies sequences."""

from __future__ import annotations

import math

from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal

POSITIONS = 512  # of the published model; longer sequences enlarge the table
EPSILON = 1e-12
INIT = Normal(0.02)


def _linear(x: Tensor, features: int, name: str) -> Tensor:
    return nn.linear(x, features, name=name, weight_init=INIT, bias_init=0.0)


def _norm(x: Tensor, name: str) -> Tensor:
    return nn.layer_norm(x, epsilon=EPSILON, name=name)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attention of [batch, positions, heads, depth]; probabilities that are dropped are there in full."""
    if not dropout:
        return nn.attention(q, k, v, heads_last=True)
    q, k, v = (x.transpose((0, 2, 1, 3)) for x in (q, k, v))
    scores = (q @ k.transpose((0, 1, 3, 2))) * (1 / math.sqrt(q.shape[-1]))
    return (nn.dropout(nn.softmax(scores), dropout) @ v).transpose((0, 2, 1, 3))


def block(x: Tensor, heads: int, dropout: float, attention_dropout: float) -> Tensor:
    """Self-attention and a feed-forward layer, each added and then normalised."""
    width = x.shape[-1]
    with nn.scope("attention"):
        (q,), (k,), (v,) = (nn.split_heads(_linear(x, width, name), heads) for name in ("query", "key", "value"))
        y = _linear(nn.join_heads(attend(q, k, v, attention_dropout)), width, "output")
        x = _norm(x + nn.dropout(y, dropout), "norm")
    y = _linear(nn.gelu(_linear(x, 4 * width, "intermediate")), width, "output")
    return _norm(x + nn.dropout(y, dropout), "norm")


def bert_base(
    batch: int = 8,
    seq: int = 512,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    classes: int = 0,
) -> Graph:
    """BERT base: `tokens` and `segments` int64[batch,seq] → `logits` [batch,seq,vocabulary]; 109,514,298 parameters.

    Embeddings and encoder have 108,891,648 (the published 109,482,240 add a pooler of 590,592, which this head does
    not use); the head has a dense layer, a normalisation and a bias, and its matrix is the token embedding. All weights
    are drawn from N(0, 0.02²). Every position attends to every other: batches are not padded. Published models are
    trained with `dropout` and `attention_dropout`, of attention's probabilities, at 0.1.

    With `classes`, `logits` are [batch, classes]: the pooler reads the first position, and a layer its result.
    """

    def model(tokens: Tensor, segments: Tensor) -> dict[str, Tensor]:
        with nn.scope("embeddings"):
            x = nn.embedding(tokens, vocabulary, width, name="word", weight_init=INIT)
            x = x + nn.parameter("position.weight", (max(POSITIONS, seq), width), INIT)[:seq]
            x = x + nn.embedding(segments, 2, width, name="segment", weight_init=INIT)
            x = nn.dropout(_norm(x, "norm"), dropout)
        for i in range(layers):
            with nn.scope("encoder"), nn.scope(i):
                x = block(x, heads, dropout, attention_dropout)
        if classes:
            with nn.scope("pooler"):
                first = nn.dropout(nn.tanh(_linear(x[:, 0], width, "dense")), dropout)
            return {"logits": _linear(first, classes, "classifier")}
        with nn.scope("head"):
            x = _norm(nn.gelu(_linear(x, width, "dense")), "norm")
            scores = x @ nn.shared("embeddings.word.weight").T
            return {"logits": scores + nn.parameter("bias", vocabulary)}

    ids = spec((batch, seq), "int64")
    return trace(model, ids, ids, name="bert_base")
