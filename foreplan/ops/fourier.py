"""Discrete Fourier transforms, as products with constant matrices of sines and cosines.

Complex numbers are pairs (real, imaginary) along a last axis. A long transform is two shorter ones with a twist between
(Cooley and Tukey 1965), as far as its length has factors.
"""

from __future__ import annotations

import math

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import Array, Builder, Kind, TensorType, Value
from foreplan.ops.conv.ops import conv
from foreplan.ops.join import pad
from foreplan.ops.map import convert, elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.shape import reshape, slice_axis, transpose

DIRECT = 256  # a longer transform is made of shorter ones, if its length has factors
MOST_ELEMENTS = 1 << 24  # of a matrix


def dft(
    b: Builder, x: Value, length: int | None = None, axis: int = -2, inverse: bool = False, onesided: bool = False
) -> Value:
    """The Fourier transform of x [..., n, ..., 1 or 2] along an axis, as ONNX DFT.

    Args:
        b: where nodes are added.
        x: real or complex numbers.
        length: what x is cut or filled up with zeros to; by default what it has.
        axis: not the last one; negative ones count from the end.
        inverse: back from frequencies, divided by the length.
        onesided: forward, of real numbers: the first length // 2 + 1 frequencies; inverse: from these to real numbers.

    Returns:
        Complex numbers [..., m, ..., 2]; with both, real ones [..., length, ..., 1].

    Raises:
        ShapeError: x is no such tensor.
        UnsupportedError: the length is too large, and has no factors.
    """
    rank = len(x.shape)
    axis = axis + rank if axis < 0 else axis
    if rank < 2 or x.shape[-1] not in (1, 2) or not 0 <= axis < rank - 1 or not x.dtype.is_float:
        raise ShapeError(f"a Fourier transform along axis {axis} needs [..., n, ..., 1 or 2] of floats, and got {x!r}")
    n, parts = x.shape[axis], x.shape[-1]
    count = length or (2 * (n - 1) if inverse and onesided else n)
    if count < 1 or (onesided and not inverse and parts == 2):
        raise ShapeError(f"{x!r} has no such transform of length {count}" + " with one side" * onesided)
    order = [*(i for i in range(rank) if i not in (axis, rank - 1)), axis, rank - 1]
    rows = transpose(b, convert(b, x, x.dtype.wide), order)
    outer = rows.shape[:-2]
    read = min(n, count // 2 + 1 if inverse and onesided else count)
    flat = slice_axis(b, reshape(b, rows, (math.prod(outer), n, parts)), 1, 0, read)
    if count > DIRECT and not (inverse and onesided) and _factor(count) > 1:
        found = _long(b, flat, count, inverse)
        found = slice_axis(b, found, 1, 0, count // 2 + 1) if onesided else found
    else:
        matrix = _matrix(count, read, parts, inverse, onesided)
        whole = matmul(b, reshape(b, flat, (flat.shape[0], read * parts)), _constant(b, matrix, flat))
        found = reshape(b, whole, (flat.shape[0], -1, 1 if inverse and onesided else 2))
    back = [order.index(i) for i in range(rank)]
    return transpose(b, reshape(b, convert(b, found, x.dtype), (*outer, *found.shape[1:])), back)


def stft(b: Builder, x: Value, step: int, length: int, window: Value | None = None, onesided: bool = True) -> Value:
    """Fourier transforms of frames of x [N, T, 1 or 2], as ONNX STFT: a convolution with sines and cosines.

    Args:
        b: where nodes are added.
        x: real or complex signals.
        step: from one frame to the next.
        length: of a frame.
        window: of at most that length, by which each frame is multiplied.
        onesided: give the first length // 2 + 1 frequencies.

    Returns:
        [N, frames, frequencies, 2].
    """
    if (
        len(x.shape) != 3
        or x.shape[2] not in (1, 2)
        or not x.dtype.is_float
        or not 1 <= length <= x.shape[1]
        or step < 1
    ):
        raise ShapeError(f"frames of {length} elements, {step} apart, need signals [N, T, 1 or 2] of floats, not {x!r}")
    if window is not None and (len(window.shape) != 1 or window.shape[0] > length):
        raise ShapeError(f"the window {window!r} must be a vector of at most {length} elements")
    parts, taps = x.shape[2], length if window is None else window.shape[0]
    matrix = _matrix(length, taps, parts, False, onesided)  # [taps · parts, frequencies · 2]
    kernel = _constant(b, matrix.reshape(taps, parts, -1).transpose(2, 1, 0), x)
    if window is not None:
        kernel = elementwise(b, lambda k, w: k * w, kernel, window, dtype=x.dtype)
    frames = conv(b, transpose(b, x, (0, 2, 1)), convert(b, kernel, x.dtype), strides=step)
    frames = slice_axis(b, frames, 2, 0, 1 + (x.shape[1] - length) // step)
    return transpose(b, reshape(b, frames, (x.shape[0], -1, 2, frames.shape[2])), (0, 3, 1, 2))


def _long(b: Builder, x: Value, count: int, inverse: bool) -> Value:
    """All frequencies of x [B, n, 1 or 2], in two steps: element j₁·n₂ + j₂ becomes frequency k₁ + n₁·k₂."""
    first = _factor(count)
    second = count // first
    if x.shape[1:] != (count, 2):
        x = pad(b, x, ((0, 0), (0, count - x.shape[1]), (0, 2 - x.shape[2])))
    columns = transpose(b, reshape(b, x, (x.shape[0], first, second, 2)), (0, 2, 1, 3))
    inner = dft(b, columns, first, 2, inverse)  # [B, j₂, k₁, 2]
    angles = np.outer(np.arange(second), np.arange(first)) * (2 * math.pi / count)
    sines = np.sin(angles) * (1 if inverse else -1)
    cosines = _constant(b, np.stack([np.cos(angles)] * 2, -1), x)
    turned = _constant(b, np.stack([-sines, sines], -1), x)
    swapped = slice_axis(b, inner, 3, 1, 2, -1)
    inner = elementwise(b, lambda x, y, c, s: x * c + y * s, inner, swapped, cosines, turned)
    outer = dft(b, inner, second, 1, inverse)  # [B, k₂, k₁, 2]
    return reshape(b, outer, (x.shape[0], count, 2))


def _factor(count: int) -> int:
    """The largest factor that is not above the square root."""
    return next(i for i in range(math.isqrt(count), 0, -1) if count % i == 0)


def _matrix(count: int, read: int, parts: int, inverse: bool, onesided: bool) -> np.ndarray:
    """A transform's matrix, float64 [read · parts, m · 2]; from one side to real numbers [read · 2, count]."""
    to_real = inverse and onesided
    written = count if to_real or not onesided else count // 2 + 1
    if read * parts * written * (2 - to_real) > MOST_ELEMENTS:
        raise UnsupportedError(
            f"a Fourier transform of {count} elements needs a matrix of more than {MOST_ELEMENTS:,} numbers; "
            "take a length with small factors"
        )
    # Whole turns are taken away in integers, so that large angles are exact.
    turns = np.outer(np.arange(read, dtype=np.int64), np.arange(written, dtype=np.int64)) % count
    angles = turns * (2 * math.pi / count * (1 if inverse else -1))
    cosine, sine = (f(angles) / (count if inverse else 1) for f in (np.cos, np.sin))
    if to_real:
        # Each frequency but the first and the middle one stands for its conjugate as well.
        twice = np.full((read, 1), 2.0)
        twice[0] = 1
        if count % 2 == 0 and read == count // 2 + 1:
            twice[-1] = 1
        return np.stack([cosine * twice, -sine * twice][:parts], 1).reshape(read * parts, written)
    real = np.stack([cosine, sine], -1)  # what a real part gives: [read, written, 2]
    imaginary = np.stack([-sine, cosine], -1)
    return np.stack([real, imaginary][:parts], 1).reshape(read * parts, written * 2)


def _constant(b: Builder, array: np.ndarray, like: Value) -> Value:
    dtype = like.dtype.wide
    type = TensorType(dtype, array.shape)
    return b.store(b.scope + "waves", type, Kind.CONSTANT, Array(np.ascontiguousarray(array, dtype.numpy)))
