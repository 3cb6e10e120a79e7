"""Tensors whose content is known while a program is read: tables, masks, constants."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.graph import as_dtype

MOST_KNOWN = 1 << 26  # elements of what is computed while importing: a mask of 8,192 positions squared


def array_of(tensor: Any) -> np.ndarray:
    """The content of a PyTorch tensor."""
    import torch

    own = tensor.detach().cpu().resolve_conj().contiguous()
    if own.dtype == torch.bfloat16:
        return np.asarray(own.view(torch.uint16).numpy().view(as_dtype("bfloat16").numpy))
    return np.asarray(own.numpy())
