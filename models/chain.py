"""Nine convolutions in a row: few weights, large activations, nothing between them."""

from __future__ import annotations

from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph

CHANNELS = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def conv_chain(batch: int = 1, size: int = 1024) -> Graph:
    """Nine 3×3 convolutions with bias and padding 1: channels 1, 256, 128, 64, 32, 16, 8, 4, 2, 1; no activations.

    Input `images` float32[batch,1,size,size], output `output` of the same shape. Initialisers are PyTorch's.
    """

    def model(images: Tensor) -> Tensor:
        x = images
        for i, channels in enumerate(CHANNELS, 1):
            x = nn.conv(x, channels, 3, padding=1, name=f"conv{i}")
        return x

    return trace(model, spec((batch, 1, size, size)), name="conv_chain")
