"""MobileNetV2 (Sandler et al. 2018)."""

from __future__ import annotations

from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Normal

# (expansion, channels, blocks, stride of the first block), table 2 of the paper.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv_bn(x: Tensor, channels: int, kernel: int, stride: int, groups: int, conv: str, norm: str) -> Tensor:
    init = nn.kaiming_normal_fan_out((channels, x.shape[1] // groups, kernel, kernel))
    y = nn.conv(x, channels, kernel, stride, kernel // 2, groups, bias=False, name=conv, weight_init=init)
    return nn.batch_norm(y, name=norm)


def inverted_residual(x: Tensor, channels: int, stride: int, expansion: int) -> Tensor:
    """1×1 up, 3×3 a channel, 1×1 down without activation; the input is added where the shape stays."""
    y, hidden = x, x.shape[1] * expansion
    with nn.scope("conv"):
        last = 1
        if expansion != 1:
            y = nn.relu6(_conv_bn(y, hidden, 1, 1, 1, "0.0", "0.1"))
            last = 2
        y = nn.relu6(_conv_bn(y, hidden, 3, stride, hidden, f"{last - 1}.0", f"{last - 1}.1"))
        y = _conv_bn(y, channels, 1, 1, 1, str(last), str(last + 1))
    return x + y if stride == 1 and x.shape[1] == channels else y


def mobilenet_v2(batch: int = 32, size: int = 224, classes: int = 1000, dropout: float = 0.0) -> Graph:
    """MobileNetV2 of width 1: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 3,504,872 parameters.

    Convolutions are drawn from N(0, 2 / fan_out), the linear layer from N(0, 0.01²), as torchvision's, which
    drops out a fifth of the features before it (dropout=0.2).
    """

    def model(images: Tensor) -> dict[str, Tensor]:
        with nn.scope("features"):
            x = nn.relu6(_conv_bn(images, 32, 3, 2, 1, "0.0", "0.1"))
            index = 1
            for expansion, channels, blocks, stride in STAGES:
                for i in range(blocks):
                    with nn.scope(index):
                        x = inverted_residual(x, channels, 1 if i else stride, expansion)
                    index += 1
            x = nn.relu6(_conv_bn(x, 1280, 1, 1, 1, f"{index}.0", f"{index}.1"))
        x = nn.dropout(nn.global_avg_pool(x), dropout)
        return {"logits": nn.linear(x, classes, name="classifier.1", weight_init=Normal(0.01), bias_init=0.0)}

    return trace(model, spec((batch, 3, size, size)), name="mobilenet_v2")
