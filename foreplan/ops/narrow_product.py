"""The NumPy kernel of products of elements narrower than float32: tile by tile, in float32, and rounded once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foreplan.ops.blocks import Piece, carve

TILE = 256  # rows and columns of a tile of the product
DEPTH = 512  # terms that are added at once

WIDE = np.dtype(np.float32)


def tile_pieces(m: int, k: int, n: int) -> list[Piece]:
    """Scratch of `narrow_product` for [m, k] times [k, n]: tiles of both, their product, and the sum of products."""
    m, n, k = min(m, TILE), min(n, TILE), min(k, DEPTH)
    several = (m, n) if k == DEPTH else (0, 0)
    return [((m, k), WIDE), ((k, n), WIDE), (several, WIDE), ((m, n), WIDE)]


def narrow_product(a: np.ndarray, b: np.ndarray, base: np.ndarray | None, y: np.ndarray, workspace: np.ndarray) -> None:
    """y = a·b (+ base), matrices with any strides; y may be base itself."""
    (m, k), n = a.shape, b.shape[1]
    if not y.size:
        return
    left, right, product, total = carve(workspace, *tile_pieces(m, k, n))
    for rows in _ranges(m, TILE):
        for columns in _ranges(n, TILE):
            place = y[rows, columns]
            sums = total.reshape(-1)[: place.size].reshape(place.shape)
            if not k:
                sums.fill(0)
            for terms in _ranges(k, DEPTH):
                out = product.reshape(-1)[: place.size].reshape(place.shape) if terms.start else sums
                np.matmul(_widened(a[rows, terms], left), _widened(b[terms, columns], right), out=out)
                if terms.start:
                    sums += out
            if base is not None:
                sums += base[rows, columns]
            np.copyto(place, sums, casting="unsafe")


def _ranges(extent: int, step: int) -> Iterator[slice]:
    for start in range(0, extent, step):
        yield slice(start, min(extent, start + step))


def _widened(x: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    wide = scratch.reshape(-1)[: x.size].reshape(x.shape)
    np.copyto(wide, x)
    return wide
