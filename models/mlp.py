"""A multi-layer perceptron."""

from __future__ import annotations

from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph


def mlp(batch: int = 256, width: int = 1024, layers: int = 4, inputs: int = 784, classes: int = 10) -> Graph:
    """`layers` hidden layers of `width` with ReLU: `x` float32[batch,inputs] → `logits` [batch,classes].

    Initialisers are PyTorch's.
    """

    def model(x: Tensor) -> dict[str, Tensor]:
        for i in range(layers):
            x = nn.relu(nn.linear(x, width, name=f"hidden{i}"))
        return {"logits": nn.linear(x, classes, name="out")}

    return trace(model, spec((batch, inputs)), name="mlp")
