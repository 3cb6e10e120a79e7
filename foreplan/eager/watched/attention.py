"""What a card takes for attention, which PyTorch chooses by type, mask and head size.

References: `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `attention.cpp` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.nn import functional as F

_NARROW = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of the flash kernel
_asked = ["auto"]  # the kernels that are asked for; the last one counts


@cache
def attention_on_card() -> torch.library.Library:
    """A card's attention for the device in PyTorch's place for further ones; once in a process, as long as it lasts."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    return library


@contextmanager
def attention_by(which: str) -> Iterator[None]:
    """While a kernel is asked for: `flash`, `efficient` or `math`; `auto`: PyTorch chooses."""
    _asked.append(which)
    try:
        yield
    finally:
        _asked.pop()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The result of attention, of [batch, heads, tokens, head] each."""
    chosen = _asked[-1]
    if chosen == "auto":
        chosen = _chosen(query, key, value, attn_mask, enable_gqa)
    if chosen == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    if chosen == "efficient":
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _chosen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, grouped: bool
) -> str:
    """What PyTorch takes: the first kernel of those it prefers that can."""
    sizes = {x.shape[-1] for x in (query, key, value)}
    if query.dim() != 4 or query.dtype not in (*_NARROW, torch.float32):
        return "math"
    if query.dtype in _NARROW and mask is None and len(sizes) == 1 and max(sizes) <= _LARGEST_HEAD:
        return "flash"
    unaligned = any(size % (8 if query.dtype in _NARROW else 4) for size in sizes)
    return "math" if grouped or unaligned else "efficient"


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
    """A mask is filled up to a multiple of 16 keys."""
    if grouped:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    if mask is not None:
        keys = mask.shape[-1]
        if keys % 16:
            mask = F.pad(mask, (0, 16 - keys % 16))[..., :keys]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    needs = any(x.requires_grad for x in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs, dropout_p, causal, scale=scale
    )[0]
