"""Tensors of which each rank has one part, cut along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph.init import Initializer
from foreplan.graph.types import TensorType


@dataclass(frozen=True)
class Shard:
    """How a tensor is cut: one axis is a row of blocks of equal extent, and rank r has part r of each of these.

    Attributes:
        ranks: the number of parts of a block.
        axis: not negative.
        blocks: how many; 3 where one projection makes queries, keys and values, and each rank has some heads of each.
    """

    ranks: int
    axis: int
    blocks: int = 1

    def divides(self, whole: TensorType) -> bool:
        """Whether a tensor can be cut so."""
        return 0 <= self.axis < whole.rank and whole.shape[self.axis] % (self.blocks * self.ranks) == 0

    def of(self, whole: TensorType) -> TensorType:
        """The type of a part of a tensor that can be cut so."""
        shape = list(whole.shape)
        shape[self.axis] //= self.ranks
        return whole.with_shape(tuple(shape))

    def take(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """The part of a rank, which may be a view."""
        extent = whole.shape[self.axis] // self.ranks
        parts = (self.blocks, self.ranks, extent // self.blocks)  # no -1: there may be no element at all
        apart = whole.reshape(*whole.shape[: self.axis], *parts, *whole.shape[self.axis + 1 :])
        part = apart[(slice(None),) * (self.axis + 1) + (rank,)]
        return part.reshape(*whole.shape[: self.axis], extent, *whole.shape[self.axis + 1 :])

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The whole tensor, from the parts of all ranks in their order."""
        shape = parts[0].shape
        each = (self.blocks, 1, shape[self.axis] // self.blocks)
        apart = [part.reshape(*shape[: self.axis], *each, *shape[self.axis + 1 :]) for part in parts]
        whole = np.concatenate(apart, self.axis + 1)
        return whole.reshape(*shape[: self.axis], shape[self.axis] * self.ranks, *shape[self.axis + 1 :])

    def __str__(self) -> str:
        blocks = f" of each of {self.blocks} blocks" if self.blocks > 1 else ""
        return f"1/{self.ranks}{blocks} along axis {self.axis}"


@dataclass(frozen=True)
class Sharded:
    """The first content of a stored value that holds this rank's part of a tensor.

    Attributes:
        shard: how the tensor is cut.
        type: of the whole tensor.
        init: the whole tensor's first content.
    """

    shard: Shard
    type: TensorType
    init: Initializer

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Write the whole tensor; a session keeps this rank's part of it."""
        self.init.fill(out, rng)

    def __str__(self) -> str:
        shard = self.shard
        return f"sharded({shard.ranks}, {shard.axis}, {shard.blocks}, {str(self.type)!r}, {str(self.init)!r})"
