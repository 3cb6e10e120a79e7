"""ResNet (He et al. 2016) in the form that torchvision publishes: the stride is on the 3×3 convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph

Block = Callable[[Tensor, int, int], Tensor]


def _conv(x: Tensor, channels: int, kernel: int, stride: int, name: str) -> Tensor:
    """A convolution without bias, drawn from N(0, 2 / fan_out)."""
    init = nn.kaiming_normal_fan_out((channels, x.shape[1], kernel, kernel))
    return nn.conv(x, channels, kernel, stride, kernel // 2, bias=False, name=name, weight_init=init)


def _shortcut(x: Tensor, channels: int, stride: int) -> Tensor:
    """The input itself, or projected where its shape changes."""
    if stride == 1 and x.shape[1] == channels:
        return x
    with nn.scope("downsample"):
        return nn.batch_norm(_conv(x, channels, 1, stride, "0"), name="1")


def basic_block(x: Tensor, width: int, stride: int) -> Tensor:
    """Two 3×3 convolutions around which the input is added."""
    y = nn.relu(nn.batch_norm(_conv(x, width, 3, stride, "conv1"), name="bn1"))
    y = nn.batch_norm(_conv(y, width, 3, 1, "conv2"), name="bn2")
    return nn.relu(y + _shortcut(x, width, stride))


def bottleneck(x: Tensor, width: int, stride: int) -> Tensor:
    """1×1 down, 3×3, 1×1 up to four times the width, and the input added."""
    y = nn.relu(nn.batch_norm(_conv(x, width, 1, 1, "conv1"), name="bn1"))
    y = nn.relu(nn.batch_norm(_conv(y, width, 3, stride, "conv2"), name="bn2"))
    y = nn.batch_norm(_conv(y, 4 * width, 1, 1, "conv3"), name="bn3")
    return nn.relu(y + _shortcut(x, 4 * width, stride))


def forward(images: Tensor, block: Block, depths: Sequence[int], classes: int) -> dict[str, Tensor]:
    """Stem, four stages whose width doubles, mean over positions, and a linear layer."""
    x = nn.relu(nn.batch_norm(_conv(images, 64, 7, 2, "conv1"), name="bn1"))
    x = nn.max_pool(x, 3, 2, 1)
    for stage, depth in enumerate(depths):
        with nn.scope(f"layer{stage + 1}"):
            for i in range(depth):
                with nn.scope(i):
                    x = block(x, 64 * 2**stage, 2 if stage and not i else 1)
    return {"logits": nn.linear(nn.global_avg_pool(x), classes, name="fc")}


def _resnet(name: str, block: Block, depths: Sequence[int], batch: int, size: int, classes: int) -> Graph:
    model = partial(forward, block=block, depths=depths, classes=classes)
    return trace(model, spec((batch, 3, size, size)), name=name)


def resnet18(batch: int = 32, size: int = 224, classes: int = 1000) -> Graph:
    """ResNet-18: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 11,689,512 parameters."""
    return _resnet("resnet18", basic_block, (2, 2, 2, 2), batch, size, classes)


def resnet50(batch: int = 32, size: int = 224, classes: int = 1000) -> Graph:
    """ResNet-50: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 25,557,032 parameters."""
    return _resnet("resnet50", bottleneck, (3, 4, 6, 3), batch, size, classes)


def resnet101(batch: int = 20, size: int = 224, classes: int = 1000) -> Graph:
    """ResNet-101: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 44,549,160 parameters."""
    return _resnet("resnet101", bottleneck, (3, 4, 23, 3), batch, size, classes)
