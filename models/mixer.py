"""MLP-Mixer (Tolstikhin et al. 2021)."""

from __future__ import annotations

import math

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal, TruncatedNormal

EPSILON = 1e-6
CUT = 0.87962566103423978  # standard deviation of N(0, 1) cut off at two of its standard deviations


def mlp(x: Tensor, features: int, name: str) -> Tensor:
    """Along the last axis: to `features`, GELU, and back."""
    width, bias = x.shape[-1], Normal(1e-6)
    init = nn.xavier_uniform(width, features)
    with nn.scope(name):
        x = nn.gelu(nn.linear(x, features, name="fc1", weight_init=init, bias_init=bias))
        return nn.linear(x, width, name="fc2", weight_init=init, bias_init=bias)


def block(x: Tensor, tokens: int, channels: int) -> Tensor:
    """A perceptron across the patches and one across the channels, each normalised before and added after."""
    y = nn.layer_norm(x, epsilon=EPSILON, name="norm1").swapaxes(1, 2)
    x = x + mlp(y, tokens, "mlp_tokens").swapaxes(1, 2)
    return x + mlp(nn.layer_norm(x, epsilon=EPSILON, name="norm2"), channels, "mlp_channels")


def mixer_b16(
    batch: int = 32, size: int = 224, layers: int = 12, classes: int = 1000, width: int = 768, patch: int = 16
) -> Graph:
    """Mixer-B/16: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 59,880,472 parameters.

    The perceptron across the patches has width/2 hidden features, that across the channels 4·width. Drawn as timm
    does, except that the last layer, which begins at 0 there, is drawn from N(0, 0.01²), so that gradients flow from
    the first step.

    Raises:
        UsageError: the patch does not divide the size, or the width is odd.
    """
    if size % patch:
        raise UsageError(f"mixer_b16: size must be a multiple of the patch, {patch}, and is {size}")
    if width % 2:
        raise UsageError(f"mixer_b16: width must be even, and is {width}")

    def model(images: Tensor) -> dict[str, Tensor]:
        init = TruncatedNormal(math.sqrt(1.0 / (3 * patch * patch)) / CUT)
        x = nn.conv(images, width, patch, patch, name="stem.proj", weight_init=init, bias_init=0.0)
        x = nn.flatten(x, 2).swapaxes(1, 2)
        for i in range(layers):
            with nn.scope("blocks"), nn.scope(i):
                x = block(x, width // 2, 4 * width)
        x = nn.layer_norm(x, epsilon=EPSILON, name="norm").mean(1)
        return {"logits": nn.linear(x, classes, name="head", weight_init=Normal(0.01), bias_init=0.0)}

    return trace(model, spec((batch, 3, size, size)), name="mixer_b16")
