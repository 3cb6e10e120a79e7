"""Equal indices: where each of them stands first. What is added at one row can then be added up before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Op, TensorType, register
from foreplan.graph.op import Arrays, Types
from foreplan.graph.types import INT64
from foreplan.ops.blocks import Piece, carve, carve_bytes, iota
from foreplan.ops.index import check_indices, within

_INT64 = np.dtype(np.int64)


@register
@dataclass(frozen=True)
class FirstEqual(Op):
    """y[i] = the least j with indices[j] = indices[i], modulo `extent`, in int64.

    Attributes:
        extent: of the axis that the indices count along; negative ones count from its end.
    """

    name: ClassVar[str] = "first_equal"
    extent: int

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """int64, as many as there are indices."""
        self.check_count(inputs, 1)
        (indices,) = inputs
        check_indices(indices)
        if indices.rank != 1:
            raise ShapeError(f"takes indices along one axis, and got {indices}")
        if self.extent < bool(indices.size) or self.extent * indices.size >= 1 << 63:
            raise ShapeError(f"cannot compare {indices} along an axis of {self.extent} elements")
        return (indices.with_dtype(INT64),)

    def valid_range(self, index: int, inputs: Types) -> tuple[int, int] | None:
        """From the first element, counted from either end, to the last."""
        return (-self.extent, self.extent - 1)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """None."""
        return 0

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Two numbers and a flag for each index."""
        return carve_bytes(*self._pieces(inputs[0].size))

    @staticmethod
    def _pieces(count: int) -> list[Piece]:
        return [((count,), _INT64), ((count,), _INT64), ((count,), np.dtype(np.bool_))]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Sort pairs of an index and its position, each as one number."""
        (indices,), (y,), count = inputs, outputs, inputs[0].size
        if not count:
            return
        keys, others, begins = carve(workspace, *self._pieces(count))
        iota(keys)
        within(indices, self.extent, others)
        others *= count
        keys += others
        keys.sort()
        np.floor_divide(keys, count, out=others)  # indices in order
        keys %= count  # and their positions
        begins[:1] = True
        np.not_equal(others[1:], others[:-1], out=begins[1:])
        iota(others)
        others *= begins
        np.maximum.accumulate(others, out=y)
        np.take(keys, y, out=others, mode="clip")
        y[keys] = others
