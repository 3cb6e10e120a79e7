"""Swin Transformer (Liu et al. 2021)."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, TruncatedNormal

INIT = TruncatedNormal(0.02)
HIDDEN = -100.0  # added to the scores of positions that do not see each other, as in the authors' code


def relative_positions(window: int) -> np.ndarray:
    """[T, T], T = window²: which row of the bias table is for a pair of positions in a window."""
    places = np.indices((window, window)).reshape(2, -1)
    down, right = places[:, :, None] - places[:, None, :] + window - 1
    return down * (2 * window - 1) + right


def shift_mask(side: int, window: int, shift: int) -> np.ndarray:
    """[G, 1, T, T] for G windows of an image that was rolled by `shift`: only former neighbours see each other."""
    place = np.arange(side)
    part = (place >= side - window).astype(int) + (place >= side - shift)
    regions = 3 * part[:, None] + part
    regions = regions.reshape(side // window, window, -1, window).swapaxes(1, 2).reshape(-1, 1, window * window)
    return np.where(regions[:, :, :, None] == regions[:, :, None, :], 0.0, HIDDEN).astype(np.float32)


def _linear(x: Tensor, features: int, name: str, bias: bool = True) -> Tensor:
    return nn.linear(x, features, bias, name, INIT, 0.0)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """[B, S, S, C] with zeros behind, so that S is a multiple."""
    missing = -x.shape[1] % multiple
    padded: Any = np.pad(x, ((0, 0), (0, missing), (0, missing), (0, 0))) if missing else x
    return padded


def _rolled(x: Tensor, shift: int) -> Tensor:
    rolled: Any = np.roll(x, (shift, shift), (1, 2)) if shift else x
    return rolled


def window_attention(x: Tensor, heads: int, window: int, shift: int) -> Tensor:
    """Self-attention within windows of an image [B, S, S, C] that is rolled by `shift` before, and rolled back.

    Windows stand beside heads, so that one mask serves all images.
    """
    batch, side, _, width = x.shape
    y = _padded(x, window)
    count, places = y.shape[1] // window, window * window
    shift = shift if count > 1 else 0
    y = _rolled(y, -shift).reshape(batch, count, window, count, window, width)
    y = y.transpose(0, 2, 4, 1, 3, 5).reshape(batch, places, count * count, width)
    table = nn.parameter("relative_position_bias_table", ((2 * window - 1) ** 2, heads), INIT)
    bias: Any = table[relative_positions(window)].transpose(2, 0, 1)
    bias = bias + shift_mask(count * window, window, shift) if shift else np.broadcast_to(bias, (count**2, *bias.shape))
    qkv: Any = np.split(_linear(y, 3 * width, "qkv"), 3, -1)
    q, k, v = (each.reshape(batch, places, count * count * heads, width // heads) for each in qkv)
    y = nn.attention(q, k, v, bias.reshape(1, -1, places, places), heads_last=True)
    y = _linear(y.reshape(batch, places, count * count, width), width, "proj")
    y = y.reshape(batch, window, window, count, count, width).transpose(0, 3, 1, 4, 2, 5)
    return _rolled(y.reshape(batch, count * window, count * window, width), shift)[:, :side, :side]


def block(x: Tensor, heads: int, window: int, shift: int, dropped: float) -> Tensor:
    """Attention within windows and a feed-forward layer, each normalised before and added after.

    Args:
        x: [B, S, S, C].
        heads: of the attention.
        window: extent of the windows.
        shift: by which they are moved.
        dropped: share of the items whose branches training leaves out.
    """
    y = nn.layer_norm(x, name="norm1")
    with nn.scope("attn"):
        x = x + nn.stochastic_depth(window_attention(y, heads, window, shift), dropped)
    y = nn.layer_norm(x, name="norm2")
    with nn.scope("mlp"):
        y = _linear(nn.gelu(_linear(y, 4 * x.shape[-1], "0")), x.shape[-1], "3")
    return x + nn.stochastic_depth(y, dropped)


def patch_merging(x: Tensor) -> Tensor:
    """[B, S, S, C] → [B, S/2, S/2, 2·C]: the features of four neighbours, normalised, by one product."""
    x = _padded(x, 2)
    x = nn.concat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], axis=-1)
    return _linear(nn.layer_norm(x, name="norm"), x.shape[-1] // 2, "reduction", bias=False)


def swin_t(
    batch: int = 32,
    size: int = 224,
    blocks: int = 2,
    classes: int = 1000,
    width: int = 96,
    heads: int = 3,
    window: int = 7,
    patch: int = 4,
    stochastic_depth: float = 0.0,
) -> Graph:
    """Swin-T: `images` float32[batch,3,size,size] → `logits` [batch,classes]; 28,288,354 parameters.

    Four stages of `blocks` blocks each, the third of three times as many; from each to the next, `width` and `heads`
    double. Every second block shifts the windows. Drawn as torchvision does, which trains with stochastic depth 0.2:
    the share of dropped branches grows from 0 to it. Its checkpoints hold the indices of the bias tables too, which
    are constants here: load them with strict=False.

    Raises:
        UsageError: the patch exceeds the size, or the heads do not divide the width.
    """
    if size < patch:
        raise UsageError(f"swin_t: size must be at least the patch, {patch}, and is {size}")
    if width % heads:
        raise UsageError(f"swin_t: width must be a multiple of heads, {heads}, and is {width}")
    counts = (blocks, blocks, 3 * blocks, blocks)

    def model(images: Tensor) -> dict[str, Tensor]:
        with nn.scope("features"):
            with nn.scope(0):
                x = nn.conv(images, width, patch, patch, name="0").transpose(0, 2, 3, 1)
                x = nn.layer_norm(x, name="2")
            for stage, count in enumerate(counts):
                if stage:
                    with nn.scope(2 * stage):
                        x = patch_merging(x)
                with nn.scope(2 * stage + 1):
                    for i in range(count):
                        dropped = stochastic_depth * (sum(counts[:stage]) + i) / (sum(counts) - 1)
                        with nn.scope(i):
                            x = block(x, heads * 2**stage, window, window // 2 if i % 2 else 0, dropped)
        x = nn.layer_norm(x, name="norm").mean((1, 2))
        return {"logits": _linear(x, classes, "head")}

    return trace(model, spec((batch, 3, size, size)), name="swin_t")
