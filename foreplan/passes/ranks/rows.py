"""Tensors joined to a row, and taken out of it again."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.graph import Builder, DType, Fill, Kind, TensorType, Value
from foreplan.ops.join import concat
from foreplan.ops.shape import reshape, slice_axis


def joined(b: Builder, tensors: Sequence[Value], starts: Sequence[int], size: int) -> Value:
    """Tensors as a row of elements, each from its start on, with zeros between and behind them."""
    pieces, end = list[Value](), 0
    for tensor, start in zip(tensors, starts, strict=True):
        pieces += _zeros(b, tensor.dtype, start - end)
        pieces.append(reshape(b, tensor, (tensor.type.size,)))
        end = start + tensor.type.size
    return concat(b, [*pieces, *_zeros(b, tensors[0].dtype, size - end)])


def taken(b: Builder, row: Value, start: int, type: TensorType) -> Value:
    """A tensor of a row: a view."""
    return reshape(b, slice_axis(b, row, 0, start, type.size), type.shape)


def _zeros(b: Builder, dtype: DType, count: int) -> list[Value]:
    """So many zeros, which all rows share."""
    if not count:
        return []
    type = TensorType(dtype, (count,))
    kept = (v for v in b.stored if v.kind is Kind.CONSTANT and v.type == type and v.init == Fill(0.0))
    return [next(kept, None) or b.store(f"zeros{count}", type, Kind.CONSTANT, Fill(0.0))]
