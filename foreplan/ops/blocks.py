"""How kernels cut tensors into blocks that stay in a core's cache, and carve scratch arrays out of their workspace."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from foreplan.base.units import align_up
from foreplan.graph import TensorType
from foreplan.graph.types import Shape

BLOCK = 32 * 1024  # elements a block, unless one row is longer
ALIGNMENT = 64

Piece = tuple[Shape, np.dtype]
Folded = tuple[int, int, int]  # extents: before an axis, along it, behind it


def carve_bytes(*pieces: Piece) -> int:
    """Workspace that `carve` needs for scratch arrays of these shapes and element types."""
    return sum(align_up(math.prod(shape) * dtype.itemsize, ALIGNMENT) for shape, dtype in pieces)


def carve(workspace: np.ndarray, *pieces: Piece) -> list[np.ndarray]:
    """Scratch arrays one behind the other in a workspace, each aligned to 64 bytes, content undefined."""
    arrays, start = [], 0
    for shape, dtype in pieces:
        nbytes = math.prod(shape) * dtype.itemsize
        arrays.append(workspace[start : start + nbytes].view(dtype).reshape(shape))
        start += align_up(nbytes, ALIGNMENT)
    return arrays


def folded_shape(shape: Shape, axis: int) -> Folded:
    """(elements before the axis, along it, behind it); a negative axis counts from the end."""
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def fold(array: np.ndarray, axis: int) -> np.ndarray:
    """The array as [before the axis, along it, behind it], never copied (see `can_fold`)."""
    return np.reshape(array, folded_shape(array.shape, axis), copy=False)


def can_fold(type: TensorType, strides: tuple[int, ...], axis: int) -> bool:
    """Whether `fold` works on a window with these byte strides."""
    return can_reshape(type, strides, folded_shape(type.shape, axis))


def can_reshape(type: TensorType, strides: tuple[int, ...], shape: Shape) -> bool:
    """Whether a window with these byte strides can have another shape without a copy."""
    window = np.lib.stride_tricks.as_strided(np.empty(0, type.dtype.numpy), type.shape, strides)
    try:
        np.reshape(window, shape, copy=False)
    except ValueError:
        return False
    return True


def block_extents(folded: Folded, limit: int = BLOCK) -> tuple[int, int]:
    """The outer and the inner extent of one block; the middle extent is whole.

    A block has at most `limit` elements, or one row (64 adjacent ones where rows are not dense) if rows are longer.
    """
    outer, n, inner = folded
    row = max(1, n * inner)
    if row <= limit:
        return min(outer, max(1, limit // row)), inner
    return min(outer, 1), min(inner, max(64, limit // max(1, n)))


def blocks(folded: Folded, limit: int = BLOCK) -> Iterator[tuple[slice, slice]]:
    """(slice of the outer extent, slice of the inner extent) of each block, in order."""
    outer, _, inner = folded
    rows, columns = block_extents(folded, limit)
    for o in range(0, outer, max(1, rows)):
        for i in range(0, inner, max(1, columns)):
            yield slice(o, min(outer, o + rows)), slice(i, min(inner, i + columns))


def iota(out: np.ndarray) -> np.ndarray:
    """Write 0, 1, 2, … into a one-dimensional array, which is returned."""
    out[:1] = 0
    done = 1
    while done < out.size:
        step = min(done, out.size - done)
        np.add(out[:step], done, out=out[done : done + step])
        done += step
    return out


def flush(p: np.ndarray) -> None:
    """Lower probabilities by what is lost in their last bits, down to 0, in place.

    No denormal number is left; matrix products take many times as long with these. In float32, probabilities from 1e-23
    up stay as they are, and so does 0. Narrower elements all stay: float16 would lose numbers that matter, and its
    products are slow in any case.
    """
    if p.itemsize < 4:
        return
    kind = np.finfo(p.dtype)
    p -= kind.tiny / kind.eps
    np.maximum(p, 0, out=p)
