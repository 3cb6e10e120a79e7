"""The U-Net of denoising diffusion probabilistic models (Ho et al. 2020)."""

from __future__ import annotations

import math

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph

EPSILON = 1e-6
LEVELS = (1, 2, 2, 2)  # widths at each resolution, as multiples of the first; each next has half the extent
ATTENTION = 1  # the level whose residual blocks attention follows


def time_embedding(timesteps: Tensor, width: int) -> Tensor:
    """Sines and cosines of the times at `width`/2 frequencies, then two layers, each with SiLU: [N] → [N, 4·width]."""
    half = width // 2
    frequencies = np.exp(-math.log(10_000) * np.arange(half) / (half - 1)).astype(np.float32)
    angles = timesteps.astype("float32").reshape(-1, 1) * frequencies
    x = nn.concat([np.sin(angles), np.cos(angles)])
    x = nn.silu(nn.linear(x, 4 * width, name="time_embedding.linear_1"))
    return nn.silu(nn.linear(x, 4 * width, name="time_embedding.linear_2"))


def residual(x: Tensor, time: Tensor, channels: int, groups: int, dropout: float) -> Tensor:
    """Two 3×3 convolutions, the time added between them; the input is added, projected where the channels change."""
    y = nn.silu(nn.group_norm(x, groups, EPSILON, name="norm1"))
    y = nn.conv(y, channels, 3, padding=1, name="conv1")
    y = y + nn.linear(time, channels, name="time_emb_proj").reshape(-1, channels, 1, 1)
    y = nn.dropout(nn.silu(nn.group_norm(y, groups, EPSILON, name="norm2")), dropout)
    y = nn.conv(y, channels, 3, padding=1, name="conv2")
    return y + (x if x.shape[1] == channels else nn.conv(x, channels, 1, name="conv_shortcut"))


def attention(x: Tensor, groups: int) -> Tensor:
    """Every pixel attends to every other, with one head; the input is added."""
    batch, channels, height, width = x.shape
    y = nn.group_norm(x, groups, EPSILON, name="group_norm").reshape(batch, channels, -1).swapaxes(1, 2)
    (q,), (k,), (v,) = (nn.split_heads(nn.linear(y, channels, name=name), 1) for name in ("to_q", "to_k", "to_v"))
    y = nn.linear(nn.join_heads(nn.attention(q, k, v, heads_last=True)), channels, name="to_out.0")
    return x + y.swapaxes(1, 2).reshape(batch, channels, height, width)


def stage(
    x: Tensor,
    time: Tensor,
    channels: int,
    layers: int,
    groups: int,
    dropout: float,
    attends: bool,
    kept: list[Tensor],
    up: bool,
) -> Tensor:
    """The residual blocks of one level, with attention behind each if it `attends`.

    On the way down each result is kept. On the way up the last one kept is joined to what each block reads, and there
    is one block more, for what the level read on the way down.
    """
    for i in range(layers + up):
        joined = nn.concat([x, kept.pop()]) if up else x
        with nn.scope("resnets"), nn.scope(i):
            x = residual(joined, time, channels, groups, dropout)
        if attends:
            with nn.scope("attentions"), nn.scope(i):
                x = attention(x, groups)
        if not up:
            kept.append(x)
    return x


def middle(x: Tensor, time: Tensor, groups: int, dropout: float) -> Tensor:
    """A residual block, attention and a residual block at the lowest resolution."""
    for i in range(2):
        with nn.scope("resnets"), nn.scope(i):
            x = residual(x, time, x.shape[1], groups, dropout)
        if not i:
            with nn.scope("attentions.0"):
                x = attention(x, groups)
    return x


def forward(
    images: Tensor, timesteps: Tensor, layers: int, width: int, groups: int, dropout: float
) -> dict[str, Tensor]:
    """Four levels down, the middle, and up again."""
    time = time_embedding(timesteps, width)
    x = nn.conv(images, width, 3, padding=1, name="conv_in")
    kept, last = [x], len(LEVELS) - 1
    for level, times in enumerate(LEVELS):
        with nn.scope("down_blocks"), nn.scope(level):
            x = stage(x, time, times * width, layers, groups, dropout, level == ATTENTION, kept, up=False)
            if level != last:
                x = nn.conv(x, times * width, 3, 2, [(0, 1), (0, 1)], name="downsamplers.0.conv")
                kept.append(x)
    with nn.scope("mid_block"):
        x = middle(x, time, groups, dropout)
    for level, times in reversed(list(enumerate(LEVELS))):
        with nn.scope("up_blocks"), nn.scope(last - level):
            x = stage(x, time, times * width, layers, groups, dropout, level == ATTENTION, kept, up=True)
            if level:
                x = nn.conv(nn.upsample(x, 2), times * width, 3, padding=1, name="upsamplers.0.conv")
    x = nn.silu(nn.group_norm(x, groups, EPSILON, name="conv_norm_out"))
    return {"noise": nn.conv(x, images.shape[1], 3, padding=1, name="conv_out")}


def ddpm_unet(
    batch: int = 32,
    size: int = 32,
    channels: int = 3,
    layers: int = 2,
    width: int = 128,
    groups: int = 32,
    dropout: float = 0.0,
) -> Graph:
    """DDPM's U-Net for CIFAR-10: predicts the noise in images; 35,746,307 parameters.

    Inputs are `images` float32[batch,channels,size,size], the noisy ones, and `timesteps` int64[batch], how many steps
    of noise each has; the output is `noise`, as the images. There are four levels of `width`, 2·width, 2·width and
    2·width channels, each with `layers` residual blocks on the way down and one more on the way up. Attention is at the
    second one, 16×16 by default, and in the middle. Normalisation is over `groups` groups of channels. Names and
    initialisers are those of diffusers' UNet2DModel in the configuration of google/ddpm-cifar10-32. Ho et al. train
    with dropout=0.1.

    Raises:
        UsageError: the size is no multiple of 8, or the width none of the groups, or it is odd or below 4.
    """
    if size % 8:
        raise UsageError(f"ddpm_unet: size must be a multiple of 8, and is {size}")
    if width % groups or width % 2 or width < 4:
        raise UsageError(
            f"ddpm_unet: width must be even, at least 4 and a multiple of the groups, {groups}, and is {width}"
        )

    def model(images: Tensor, timesteps: Tensor) -> dict[str, Tensor]:
        return forward(images, timesteps, layers, width, groups, dropout)

    return trace(model, spec((batch, channels, size, size)), spec(batch, "int64"), name="ddpm_unet")
