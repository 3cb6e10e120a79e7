"""ConvNeXt (Liu et al. 2022)."""

from __future__ import annotations

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, TruncatedNormal

EPSILON = 1e-6
STRIDE = 32  # of all convolutions together
INIT = TruncatedNormal(0.02)


def _conv(x: Tensor, channels: int, kernel: int, stride: int, name: str) -> Tensor:
    return nn.conv(x, channels, kernel, stride, name=name, weight_init=INIT, bias_init=0.0)


def _norm(x: Tensor, name: str) -> Tensor:
    """Layer normalisation over the channels of [N, C, H, W]."""
    return nn.layer_norm(x.transpose(0, 2, 3, 1), epsilon=EPSILON, name=name).transpose(0, 3, 1, 2)


def block(x: Tensor, layer_scale: float, dropped: float) -> Tensor:
    """A 7×7 filter a channel, then at each position a layer of four times the width and one back; the input is added.

    Args:
        x: [N, C, H, W].
        layer_scale: first value of the factors on the branch, one a channel.
        dropped: share of the items whose branch training leaves out.
    """
    width = x.shape[1]
    with nn.scope("block"):
        y = nn.conv(x, width, 7, padding=3, groups=width, name="0", weight_init=INIT, bias_init=0.0)
        y = nn.layer_norm(y.transpose(0, 2, 3, 1), epsilon=EPSILON, name="2")
        y = nn.gelu(nn.linear(y, 4 * width, name="3", weight_init=INIT, bias_init=0.0))
        y = nn.linear(y, width, name="5", weight_init=INIT, bias_init=0.0)
    y = nn.parameter("layer_scale", (width, 1, 1), layer_scale) * y.transpose(0, 3, 1, 2)
    return x + nn.stochastic_depth(y, dropped)


def convnext_tiny(
    batch: int = 32,
    size: int = 224,
    blocks: int = 3,
    classes: int = 1000,
    width: int = 96,
    layer_scale: float = 1e-6,
    stochastic_depth: float = 0.0,
) -> Graph:
    """ConvNeXt-T: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 28,589,128 parameters.

    Four stages, of `width` to 8·`width` channels and `blocks` blocks each; the third has three times as many. Drawn as
    torchvision does, which trains with stochastic depth 0.1: the share of dropped branches grows from 0 to it.

    Raises:
        UsageError: the size is below 32.
    """
    if size < STRIDE:
        raise UsageError(f"convnext_tiny: size must be at least {STRIDE}, and is {size}")
    counts = (blocks, blocks, 3 * blocks, blocks)

    def model(images: Tensor) -> dict[str, Tensor]:
        x = images
        with nn.scope("features"):
            for stage, count in enumerate(counts):
                with nn.scope(2 * stage):
                    x = _norm(_conv(x, width, 4, 4, "0"), "1") if stage == 0 else _down(x)
                with nn.scope(2 * stage + 1):
                    for i in range(count):
                        dropped = stochastic_depth * (sum(counts[:stage]) + i) / (sum(counts) - 1)
                        with nn.scope(i):
                            x = block(x, layer_scale, dropped)
        with nn.scope("classifier"):
            x = nn.layer_norm(nn.global_avg_pool(x), epsilon=EPSILON, name="0")
            return {"logits": nn.linear(x, classes, name="2", weight_init=INIT, bias_init=0.0)}

    return trace(model, spec((batch, 3, size, size)), name="convnext_tiny")


def _down(x: Tensor) -> Tensor:
    """Half the extents, twice the channels."""
    return _conv(_norm(x, "0"), 2 * x.shape[1], 2, 2, "1")
