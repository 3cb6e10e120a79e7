"""EfficientNet (Tan and Le 2019)."""

from __future__ import annotations

import math

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Uniform

# (expansion, kernel, stride of the first block, channels, blocks), table 1 of the paper.
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def _channels(channels: int, width: float) -> int:
    """The multiple of 8 nearest to channels·width, raised where it is less than 0.9 of it."""
    wanted = channels * width
    found = max(8, int(wanted + 4) // 8 * 8)
    return found if found >= 0.9 * wanted else found + 8


def _conv_bn(x: Tensor, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> Tensor:
    init = nn.kaiming_normal_fan_out((channels, x.shape[1] // groups, kernel, kernel))
    y = nn.conv(x, channels, kernel, stride, kernel // 2, groups, bias=False, name="0", weight_init=init)
    return nn.batch_norm(y, name="1")


def squeeze_excitation(x: Tensor, squeezed: int) -> Tensor:
    """Each channel times a weight in (0, 1), made of the means of all channels (Hu et al. 2018)."""
    y = x.mean((2, 3), keepdims=True)
    for name, channels in (("fc1", squeezed), ("fc2", x.shape[1])):
        init = nn.kaiming_normal_fan_out((channels, y.shape[1], 1, 1))
        y = nn.conv(y, channels, 1, name=name, weight_init=init, bias_init=0.0)
        y = nn.silu(y) if name == "fc1" else nn.sigmoid(y)
    return x * y


def mb_conv(x: Tensor, channels: int, kernel: int, stride: int, expansion: int, dropped: float) -> Tensor:
    """1×1 up, one filter a channel, squeeze and excitation, 1×1 down; the input is added where the shape stays.

    Args:
        x: the input.
        channels: of the output.
        kernel: of the filters.
        stride: of the filters.
        expansion: by how much the first convolution widens; 1 leaves it out.
        dropped: share of the items whose branch training leaves out.
    """
    y, hidden = x, x.shape[1] * expansion
    first = int(expansion != 1)
    with nn.scope("block"):
        if first:
            with nn.scope(0):
                y = nn.silu(_conv_bn(y, hidden, 1))
        with nn.scope(first):
            y = nn.silu(_conv_bn(y, hidden, kernel, stride, hidden))
        with nn.scope(first + 1):
            y = squeeze_excitation(y, max(1, x.shape[1] // 4))
        with nn.scope(first + 2):
            y = _conv_bn(y, channels, 1)
    return x + nn.stochastic_depth(y, dropped) if y.shape == x.shape else y


def features(x: Tensor, width: float, depth: float, stochastic_depth: float) -> Tensor:
    """Stem, seven stages, and a 1×1 convolution: [N, C, H, W]. The share of dropped branches grows with the depth."""
    counts = [math.ceil(blocks * depth) for *_, blocks in STAGES]
    with nn.scope(0):
        x = nn.silu(_conv_bn(x, _channels(32, width), 3, 2))
    for stage, (expansion, kernel, stride, channels, _) in enumerate(STAGES):
        with nn.scope(stage + 1):
            for i in range(counts[stage]):
                dropped = stochastic_depth * (sum(counts[:stage]) + i) / sum(counts)
                with nn.scope(i):
                    x = mb_conv(x, _channels(channels, width), kernel, 1 if i else stride, expansion, dropped)
    with nn.scope(len(STAGES) + 1):
        return nn.silu(_conv_bn(x, 4 * x.shape[1], 1))


def efficientnet_b0(
    batch: int = 32,
    size: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    depth: float = 1.0,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
) -> Graph:
    """EfficientNet-B0: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 5,288,548 parameters.

    `width` multiplies the channels and `depth` the blocks of a stage, as in the paper: size 240, width 1.0, depth 1.1
    are B1; 260, 1.1, 1.2 are B2. Drawn as torchvision does: convolutions from N(0, 2 / fan_out), the linear layer from
    U(±1/√classes). torchvision trains with dropout 0.2 and stochastic depth 0.2.

    Raises:
        UsageError: width or depth is 0.
    """
    for name, factor in (("width", width), ("depth", depth)):
        if not factor > 0:
            raise UsageError(f"efficientnet_b0: {name} is a factor above 0, such as 1.0, and is {factor}")

    def model(images: Tensor) -> dict[str, Tensor]:
        with nn.scope("features"):
            x = features(images, width, depth, stochastic_depth)
        x = nn.dropout(nn.global_avg_pool(x), dropout)
        bound = 1 / math.sqrt(classes)
        init = Uniform(-bound, bound)
        return {"logits": nn.linear(x, classes, name="classifier.1", weight_init=init, bias_init=0.0)}

    return trace(model, spec((batch, 3, size, size)), name="efficientnet_b0")
