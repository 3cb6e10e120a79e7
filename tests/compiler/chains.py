"""The chain of convolutions of the zoo, with something between them."""

from __future__ import annotations

import foreplan as fp
from foreplan.models.chain import CHANNELS


def chain(activation: str, size: int) -> fp.Graph:
    """An image through nine convolutions.

    Args:
        activation: ReLU, GELU, or batch norm and ReLU, behind each convolution; behind the last, the norm alone.
        size: of the image.
    """

    def model(x: fp.Tensor) -> fp.Tensor:
        for i, channels in enumerate(CHANNELS, 1):
            x = fp.nn.conv(x, channels, 3, padding=1, name=f"conv{i}")
            if activation == "batch norm and ReLU":
                x = fp.nn.batch_norm(x, name=f"bn{i}")
            if channels > 1:
                x = fp.nn.gelu(x) if activation == "GELU" else fp.nn.relu(x)
        return x

    return fp.trace(model, fp.spec((1, 1, size, size)), name="chain")
