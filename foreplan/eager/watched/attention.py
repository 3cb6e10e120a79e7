"""What a card takes for attention, which PyTorch chooses by type, mask and head size.

References: `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `attention.cpp` of PyTorch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of the flash kernel


class CardAttention(TorchFunctionMode):
    """Calls a card's kernels for `F.scaled_dot_product_attention`.

    Args:
        which: `flash`, `efficient` or `math`; `auto`: as PyTorch chooses.
    """

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(self.which, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    which: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The result of attention, of [batch, heads, tokens, head] each."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    chosen = _chosen(query, key, value, attn_mask, enable_gqa) if which == "auto" else which
    if chosen == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if chosen == "efficient":
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _chosen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, grouped: bool
) -> str:
    """What PyTorch takes: the first kernel of those it prefers that can."""
    sizes = {x.shape[-1] for x in (query, key, value)}
    if query.dim() != 4 or query.dtype not in (*_NARROW, torch.float32):
        return "math"
    if query.dtype in _NARROW and mask is None and len(sizes) == 1 and max(sizes) <= _LARGEST_HEAD:
        return "flash"
    unaligned = max(sizes) % (8 if query.dtype in _NARROW else 4)
    return "math" if grouped or unaligned or (mask is not None and mask.requires_grad) else "efficient"


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, causal: bool, scale: float | None
) -> torch.Tensor:
    """Heads are filled up to a multiple of 8."""
    size = query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if size % 8:
        query, key, value = (F.pad(x, (0, 8 - size % 8)) for x in (query, key, value))
    result = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, causal, scale=scale)[0]
    return result[..., :size] if size % 8 else result


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    """A mask of truth values becomes one of numbers, and is filled up to a multiple of 16 keys."""
    if grouped:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        keys = mask.shape[-1]
        if keys % 16:
            mask = F.pad(mask, (0, 16 - keys % 16))[..., :keys]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    needs = any(x.requires_grad for x in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs, dropout_p, causal, scale=scale
    )[0]
