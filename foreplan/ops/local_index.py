"""Where a rank's part of a table has what an index of the whole table means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, TensorType, register
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.graph.types import INT64
from foreplan.ops.collective import OfRank
from foreplan.ops.expr import Arg, Expr, call, cast, where


@register
@dataclass(frozen=True)
class LocalIndex(OfRank):
    """y = the index within this rank's part of a table of `ranks` parts, as int64; -1 where another rank has it.

    Attributes:
        extent: rows of a part.
        ignored: an index that no rank has; None: there is none, and negative indices count from the table's end.
        from_end: whether these are taken from users.
    """

    name: ClassVar[str] = "local_index"
    moves: ClassVar[bool] = False  # it computes other integers
    any_strides: ClassVar[bool] = True
    extent: int
    ignored: int | None = None
    from_end: bool = True

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Integers of the same shape."""
        self.check_count(inputs, 1)
        if inputs[0].dtype.category not in ("int", "uint"):
            raise ShapeError(f"indices must be integers, and are {inputs[0]}")
        return (inputs[0].with_dtype(INT64),)

    def valid_range(self, index: int, inputs: Types) -> tuple[int, ...]:
        """The rows of the whole table."""
        rows = self.ranks * self.extent
        if self.ignored is not None:
            return 0, rows - 1, self.ignored
        return (-rows if self.from_end else 0), rows - 1

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Integers have none."""
        return [None]

    def of_rank(self, rank: int) -> Expr:
        """What a rank computes of an index a0."""
        index, first = cast(Arg(0), INT64), rank * self.extent
        if self.ignored is None:
            index = where(index < 0, index + self.ranks * self.extent, index)
        held = call("and", index >= first, index < first + self.extent)
        return where(held, index - first, -1)

    def on_rank(self, rank: int, inputs: Arrays, outputs: Arrays) -> None:
        """The index, shifted."""
        (x,), (y,) = inputs, outputs
        np.copyto(y, x, casting="unsafe")
        if self.ignored is None:
            np.add(y, self.ranks * self.extent, out=y, where=y < 0)
        y -= rank * self.extent
        np.copyto(y, -1, where=(y < 0) | (y >= self.extent))
