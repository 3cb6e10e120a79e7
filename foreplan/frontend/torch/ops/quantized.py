"""Numbers rounded as integers of few bits would hold them, for training that knows of it (arXiv:1712.05877)."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import convert, select
from foreplan.frontend.tracing.tensor import Tensor


@aten("fake_quantize_per_tensor_affine")
def _of_tensor(c: Call, x: Any, scale: Any, zero: Any, low: int, high: int) -> Tensor:
    """round(x / scale) + zero within [low, high], back as a number; the gradient passes where x is within."""
    given, factor = c.tensor(x), c.tensor(scale, c.dtype)
    offset = convert(c.tensor(zero), c.dtype)
    place: Any = np.round(given * (1.0 / factor)) + offset
    inside = (place >= low) & (place <= high)
    rounded = (np.clip(place, low, high) - offset) * factor
    return nn.straight_through(rounded, select(inside, given, 0.0))


@aten("fake_quantize_per_channel_affine")
def _of_channels(c: Call, x: Any, scale: Any, zero: Any, axis: int, low: int, high: int) -> Tensor:
    shape = [n if i == axis % len(c.shape) else 1 for i, n in enumerate(c.shape)]
    return _of_tensor(c, x, c.tensor(scale).reshape(shape), c.tensor(zero).reshape(shape), low, high)
