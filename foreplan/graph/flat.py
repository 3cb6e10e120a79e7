"""Several tensors in one stored value, one behind the other, or one rank's part of such a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreplan.base.units import align_up
from foreplan.graph.init import Fill, Initializer
from foreplan.graph.shard import Sharded
from foreplan.graph.types import DType, TensorType

ALIGNMENT = 64  # bytes: where each tensor begins in the row, and how long a rank's part is


@dataclass(frozen=True)
class Member:
    """A tensor in a row.

    Attributes:
        name: as it has it outside.
        start: its first element.
        type: its own.
        init: its first content.
        why: see `Value`.
    """

    name: str
    start: int
    type: TensorType
    init: Initializer
    why: str = ""


@dataclass(frozen=True)
class Flat:
    """The first content of a stored value that is a row of tensors, with zeros between and behind them.

    Attributes:
        members: the tensors, by ascending start.
        ranks: the value holds one part of the row, each rank of a group another one; 1: the whole row.
        stride: how far neighbours in a group stand apart; see `foreplan.ops.collective.Collective`.
    """

    members: tuple[Member, ...]
    ranks: int = 1
    stride: int = 1

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Write zeros: a session writes each tensor by its own name."""
        out[...] = 0

    def of_state(self, name: str, first: float, ranks: int, stride: int) -> Flat:
        """What an optimizer keeps of each of these tensors, in a row of the same layout.

        Args:
            name: of what it keeps.
            first: what that is full of.
            ranks, stride: as of a `Flat`.
        """
        members = (
            replace(each, name=f"{each.name}/{name}", init=of_state(each.init, each.type.dtype, first))
            for each in self.members
        )
        return Flat(tuple(members), ranks, stride)

    def __str__(self) -> str:
        members = ", ".join(repr((each.name, each.start, str(each.type), str(each.init))) for each in self.members)
        return f"flat({self.ranks}, {self.stride}, [{members}])"


def of_state(init: Initializer | None, dtype: DType, first: float) -> Initializer:
    """The first content of what an optimizer keeps of a tensor: in parts where the tensor is."""
    if isinstance(init, Sharded):
        return replace(init, type=init.type.with_dtype(dtype), init=Fill(first))
    return Fill(first)


def laid_out(types: Sequence[TensorType], ranks: int) -> tuple[list[int], int]:
    """Where tensors of one element type begin in a row, and the elements of the row; each rank has as many of these."""
    unit = max(1, ALIGNMENT // types[0].dtype.itemsize)
    starts, end = list[int](), 0
    for type in types:
        starts.append(end)
        end = align_up(end + type.size, unit)
    return starts, -(-end // (unit * ranks)) * unit * ranks
