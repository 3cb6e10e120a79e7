"""DLRM, a recommendation model (Naumov et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal, Uniform


def linear(x: Tensor, features: int, name: str) -> Tensor:
    """A layer drawn as the paper's code does: W from N(0, 2 / (in + out)), b from N(0, 1 / out)."""
    weight, bias = Normal(math.sqrt(2 / (x.shape[-1] + features))), Normal(math.sqrt(1 / features))
    return nn.linear(x, features, name=name, weight_init=weight, bias_init=bias)


def perceptron(x: Tensor, widths: Sequence[int], name: str) -> Tensor:
    """Layers with a ReLU behind each, which take every second number of a sequence."""
    for i, features in enumerate(widths):
        x = nn.relu(linear(x, features, f"{name}.{2 * i}"))
    return x


def interactions(vectors: Tensor) -> Tensor:
    """The dot product of each pair of vectors: [N, V, D] → [N, V·(V − 1)/2], row by row of the lower triangle."""
    batch, count, _ = vectors.shape
    rows, columns = np.tril_indices(count, -1)
    products = (vectors @ vectors.swapaxes(1, 2)).reshape(batch, count * count)
    return products[:, rows * count + columns]


def dlrm(
    batch: int = 2048, dense: int = 13, tables: int = 26, rows: int = 10_000, width: int = 16, hidden: int = 512
) -> Graph:
    """DLRM for the sizes of Criteo's Kaggle data: 4,635,985 parameters.

    Inputs are `dense` float32[batch,dense] and `categories` int64[batch,tables]; the output is `logits` [batch,1].
    Every table has `rows` rows of `width` numbers. The perceptron of the dense features has hidden, hidden/2, hidden/8
    and `width` features. Its result and the rows of the categories interact by their dot products. The perceptron above
    has hidden and hidden/2 features. Drawn as in the paper's code, whose tables are from U(±1/√rows). The sigmoid that
    ends the model there belongs to the loss here.

    Raises:
        UsageError: hidden is no multiple of 8.
    """
    if hidden % 8:
        raise UsageError(f"dlrm: hidden must be a multiple of 8, and is {hidden}")

    def model(dense: Tensor, categories: Tensor) -> dict[str, Tensor]:
        x = perceptron(dense, (hidden, hidden // 2, hidden // 8, width), "bot_l")
        init, vectors = Uniform(-1 / math.sqrt(rows), 1 / math.sqrt(rows)), [x]
        for i in range(tables):
            vectors.append(nn.embedding(categories[:, i], rows, width, name=f"emb_l.{i}", weight_init=init))
        pairs = interactions(nn.concat(vectors).reshape(batch, tables + 1, width))
        y = perceptron(nn.concat([x, pairs]), (hidden, hidden // 2), "top_l")
        return {"logits": linear(y, 1, "top_l.4")}

    return trace(model, spec((batch, dense)), spec((batch, tables), "int64"), name="dlrm")
