"""Fourier transforms, whose complex numbers are pairs: the three that PyTorch makes all others of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.pairs import Pair, as_pair
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.tensor import as_tensor
from foreplan.ops.fourier import dft


def _along(c: Call, x: Any, axis: int, inverse: bool, onesided: bool = False, length: int | None = None) -> Any:
    """A transform along one axis; back from frequencies, its sums are not divided by the length."""
    if isinstance(x, Pair):
        parts: Any = np.stack([c.tensor(x.real), c.tensor(x.imag)], axis=-1)
    else:
        parts = c.tensor(x)[..., None]
    axis %= parts.ndim - 1
    found = c.wrap(dft(c.b, as_tensor(parts).value, length, axis, inverse, onesided))
    found = found * float(found.shape[axis]) if inverse else found
    return found[..., 0] if found.shape[-1] == 1 else Pair(found[..., 0], found[..., 1])


def _normalised(x: Any, axes: Sequence[int], shape: Sequence[int], mode: int) -> Any:
    """Sums as they are (0), or divided by the square root of their count (1), or by the count (2)."""
    count = math.prod(shape[axis] for axis in axes)
    factor = {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[mode]
    if factor == 1:
        return x
    return Pair(x.real * factor, x.imag * factor) if isinstance(x, Pair) else x * factor


@aten("_fft_r2c")
def _of_real(c: Call, x: Any, dims: Sequence[int], mode: int, onesided: bool) -> Any:
    tensor = c.tensor(x)
    found = _along(c, tensor, dims[-1], False, onesided)
    for axis in dims[:-1]:
        found = _along(c, found, axis, False)
    return _normalised(found, dims, tensor.shape, mode)


@aten("_fft_c2c")
def _of_complex(c: Call, x: Any, dims: Sequence[int], mode: int, forward: bool) -> Any:
    found = as_pair(x)
    for axis in dims:
        found = _along(c, found, axis, not forward)
    return _normalised(found, dims, found.shape, mode)


@aten("_fft_c2r")
def _to_real(c: Call, x: Any, dims: Sequence[int], mode: int, last: int) -> Any:
    found: Any = as_pair(x)
    for axis in dims[:-1]:
        found = _along(c, found, axis, True)
    found = _along(c, found, dims[-1], True, True, last)
    return _normalised(found, dims, found.shape, mode)
