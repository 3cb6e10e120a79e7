"""U-Net (Ronneberger et al. 2015), with padding and batch normalisation as it is used today."""

from __future__ import annotations

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph


def double_conv(x: Tensor, channels: int) -> Tensor:
    """Twice: 3×3 convolution without bias, batch normalisation, ReLU."""
    for i in ("1", "2"):
        x = nn.conv(x, channels, 3, padding=1, bias=False, name=f"conv{i}")
        x = nn.relu(nn.batch_norm(x, name=f"bn{i}"))
    return x


def unet(batch: int = 4, size: int = 256, classes: int = 2, width: int = 64) -> Graph:
    """U-Net of five levels, `width` to 16·`width` channels: 31,037,698 parameters at the default sizes.

    Input `images` float32[batch,3,size,size], output `logits` [batch,classes,size,size]: scores for each pixel. Up by
    2×2 transposed convolutions of stride 2. Initialisers are PyTorch's.

    Raises:
        UsageError: the size is no multiple of 16.
    """
    if size < 16 or size % 16:
        raise UsageError(f"unet: size must be a multiple of 16, and is {size}")
    widths = [width * 2**level for level in range(5)]

    def model(images: Tensor) -> dict[str, Tensor]:
        kept: list[Tensor] = []
        x = images
        for level, channels in enumerate(widths):
            with nn.scope(f"down{level}"):
                x = double_conv(nn.max_pool(x, 2) if level else x, channels)
            kept.append(x)
        for level in reversed(range(4)):
            with nn.scope(f"up{level}"):
                x = nn.conv_transpose(x, widths[level], 2, 2, name="up")
                x = double_conv(nn.concat([kept[level], x]), widths[level])
        return {"logits": nn.conv(x, classes, 1, name="out")}

    return trace(model, spec((batch, 3, size, size)), name="unet")
