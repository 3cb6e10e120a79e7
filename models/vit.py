"""Vision Transformer (Dosovitskiy et al. 2021)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal, TruncatedNormal

EPSILON = 1e-6


def block(x: Tensor, heads: int, features: int) -> Tensor:
    """Self-attention and a feed-forward layer, each normalised before and added after."""
    width = x.shape[-1]
    x = x + nn.multi_head_attention(nn.layer_norm(x, epsilon=EPSILON, name="ln_1"), heads, name="self_attention")
    y = nn.layer_norm(x, epsilon=EPSILON, name="ln_2")
    with nn.scope("mlp"):
        init, bias = nn.xavier_uniform(width, features), Normal(1e-6)
        y = nn.gelu(nn.linear(y, features, name="0", weight_init=init, bias_init=bias))
        return x + nn.linear(y, width, name="3", weight_init=init, bias_init=bias)


def vit_b16(
    batch: int = 32,
    size: int = 224,
    layers: int = 12,
    classes: int = 1000,
    width: int = 768,
    heads: int = 12,
    patch: int = 16,
) -> Graph:
    """ViT-B/16: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 86,567,656 parameters.

    Drawn as torchvision does, except that the last layer, which begins at 0 there, is drawn from N(0, 0.01²), so that
    gradients flow from the first step.

    Raises:
        UsageError: the patch does not divide the size.
    """
    if size % patch:
        raise UsageError(f"vit_b16: size must be a multiple of the patch, {patch}, and is {size}")

    def model(images: Tensor) -> dict[str, Tensor]:
        init = TruncatedNormal(math.sqrt(1.0 / (3 * patch * patch)))
        x = nn.conv(images, width, patch, patch, name="conv_proj", weight_init=init, bias_init=0.0)
        x = nn.flatten(x, 2).swapaxes(1, 2)
        first: Any = np.broadcast_to(nn.parameter("class_token", (1, 1, width)), (batch, 1, width))
        x = nn.concat([first, x])
        with nn.scope("encoder"):
            x = x + nn.parameter("pos_embedding", (1, *x.shape[1:]), Normal(0.02))
            for i in range(layers):
                with nn.scope("layers"), nn.scope(f"encoder_layer_{i}"):
                    x = block(x, heads, 4 * width)
            x = nn.layer_norm(x, epsilon=EPSILON, name="ln")
        return {"logits": nn.linear(x[:, 0], classes, name="heads.head", weight_init=Normal(0.01), bias_init=0.0)}

    return trace(model, spec((batch, 3, size, size)), name="vit_b16")
