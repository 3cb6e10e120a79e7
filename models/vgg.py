"""VGG (Simonyan and Zisserman 2015)."""

from __future__ import annotations

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal

# Channels of the 3×3 convolutions of each stage; a 2×2 max-pool closes a stage.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(batch: int = 32, size: int = 224, classes: int = 1000, dropout: float = 0.0) -> Graph:
    """VGG-16, configuration D: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 138,357,544 parameters.

    The size must be a multiple of 32, and the first linear layer's weight grows with it. Convolutions are drawn from
    N(0, 2 / fan_out), linear layers from N(0, 0.01²), biases begin at 0. The
    paper drops out half of what the first two linear layers give (dropout=0.5).

    Raises:
        UsageError: the size is no multiple of 32.
    """
    if size < 32 or size % 32:
        raise UsageError(f"vgg16: size must be a multiple of 32, and is {size}")

    def model(images: Tensor) -> dict[str, Tensor]:
        x, layer = images, 0
        with nn.scope("features"):
            for widths in STAGES:
                for channels in widths:
                    init = nn.kaiming_normal_fan_out((channels, x.shape[1], 3, 3))
                    x = nn.conv(x, channels, 3, padding=1, name=str(layer), weight_init=init, bias_init=0.0)
                    x = nn.relu(x)
                    layer += 2
                x = nn.max_pool(x, 2)
                layer += 1
        x = nn.flatten(x)
        with nn.scope("classifier"):
            for name in ("0", "3"):
                x = nn.relu(nn.linear(x, 4096, name=name, weight_init=Normal(0.01), bias_init=0.0))
                x = nn.dropout(x, dropout)
            return {"logits": nn.linear(x, classes, name="6", weight_init=Normal(0.01), bias_init=0.0)}

    return trace(model, spec((batch, 3, size, size)), name="vgg16")
