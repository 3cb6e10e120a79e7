"""How one axis is resized: the elements that each element of the result reads, and their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MODES = ("nearest", "linear", "cubic")
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of new elements among the old ones: i lies at (i + shift) · factor / divisor − shift + extra."""

    shift: float
    factor: float
    divisor: float
    extra: float

    def of(self, indices: np.ndarray) -> np.ndarray:
        """Coordinates of indices, in float64; in this order of operations, so that every engine rounds alike."""
        return (indices + self.shift) * self.factor / self.divisor - self.shift + self.extra


@dataclass(frozen=True)
class Interpolation:
    """One axis that is resized.

    Attributes:
        before, after: extents.
        scale: the second over the first, as coordinates take it.
        mode, coordinate, rounding, cubic_a, exclude_outside, antialias: as `Resize` has them.
    """

    before: int
    after: int
    scale: float
    mode: str
    coordinate: str
    rounding: str
    cubic_a: float
    exclude_outside: bool
    antialias: bool

    @property
    def coordinates(self) -> Coordinates:
        """Where each element of the result lies."""
        exact = self.scale * self.before
        if self.coordinate == "asymmetric":
            return Coordinates(0.0, 1.0, self.scale, 0.0)
        if self.coordinate == "align_corners":
            return Coordinates(0.0, (self.before - 1) / (exact - 1) if exact != 1 else 0.0, 1.0, 0.0)
        if self.coordinate == "pytorch_half_pixel" and self.after == 1:
            return Coordinates(0.0, 0.0, 1.0, 0.0)
        symmetric = self.coordinate == "half_pixel_symmetric"
        return Coordinates(0.5, 1.0, self.scale, self.before / 2 * (1 - self.after / exact) if symmetric else 0.0)

    @property
    def shrink(self) -> float:
        """The factor of distances: less than 1 where the kernel is stretched."""
        return min(self.scale, 1.0) if self.antialias else 1.0

    @property
    def first(self) -> int:
        """The first element that is read, relative to the one at a coordinate or right before it."""
        reach = {"nearest": 0, "linear": 1, "cubic": 2}[self.mode]
        return math.floor(-reach / self.shrink) + 1 if reach else 0

    @property
    def terms(self) -> int:
        """The number of elements that are read."""
        return 1 if self.mode == "nearest" else 2 - 2 * self.first

    @property
    def is_normalised(self) -> bool:
        """Whether weights are divided by their sum."""
        return self.exclude_outside or self.antialias

    @property
    def table(self) -> Table:
        """The table of the whole axis."""
        return _table(self)

    @property
    def most_readers(self) -> int:
        """The most elements of the result from the first to the last one that read the same element."""
        indices, places = self.table.indices, np.arange(self.before)
        counts = np.searchsorted(indices[0], places, "right") - np.searchsorted(indices[-1], places, "left")
        return int(counts.max())


@dataclass(frozen=True, eq=False)
class Table:
    """y[o] = Σ_t weights[t, o] · x[indices[t, o]] along one axis.

    Attributes:
        indices: int64 [terms, outputs].
        weights: float64 [terms, outputs], or None where the only term has weight 1.
        inputs: extent before.
    """

    indices: np.ndarray
    weights: np.ndarray | None
    inputs: int

    @property
    def transposed(self) -> Table:
        """The table of the adjoint: the outputs that read each input."""
        return _transpose(self)


@lru_cache(maxsize=256)
def _transpose(table: Table) -> Table:
    terms, outputs = table.indices.shape
    weights = np.ones((terms, outputs)) if table.weights is None else table.weights
    goes_to: list[dict[int, float]] = [{} for _ in range(table.inputs)]
    for o in range(outputs):
        for index, weight in zip(table.indices[:, o].tolist(), weights[:, o].tolist()):
            if weight:
                goes_to[index][o] = goes_to[index].get(o, 0.0) + weight
    most = max(1, *map(len, goes_to))
    # Rows with fewer terms repeat one of their own with weight 0, so that infinities and NaN spread no further.
    found = np.zeros((most, table.inputs), np.int64)
    shares = np.zeros((most, table.inputs))
    for i, row in enumerate(goes_to):
        found[:, i] = next(iter(row), 0)
        found[: len(row), i] = list(row)
        shares[: len(row), i] = list(row.values())
    return Table(found, shares, outputs)


@lru_cache(maxsize=256)
def _table(axis: Interpolation) -> Table:
    at = axis.coordinates.of(np.arange(axis.after, dtype=np.float64))
    if axis.mode == "nearest":
        nearest = {
            "round_prefer_floor": lambda: np.ceil(at - 0.5),
            "round_prefer_ceil": lambda: np.floor(at + 0.5),
            "floor": lambda: np.floor(at),
            "ceil": lambda: np.ceil(at),
        }[axis.rounding]()
        return Table(np.clip(nearest.astype(np.int64), 0, axis.before - 1)[None], None, axis.before)
    offsets = np.arange(axis.first, axis.first + axis.terms)[:, None]
    base = np.floor(at)
    distances = (offsets - (at - base)) * axis.shrink
    linear = axis.mode == "linear"
    weights = np.maximum(1 - np.abs(distances), 0) if linear else _cubic(distances, axis.cubic_a)
    indices = base.astype(np.int64) + offsets
    if axis.exclude_outside:
        weights[(indices < 0) | (indices >= axis.before)] = 0
    if axis.is_normalised:
        weights /= weights.sum(0)
    return Table(np.clip(indices, 0, axis.before - 1), weights, axis.before)


def _cubic(distances: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel (Keys 1981)."""
    d = np.abs(distances)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))
