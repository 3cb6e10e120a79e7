"""Ops that read or add at places, sort, and add up along an axis."""

from __future__ import annotations

from foreplan.export.emitter import Emitter
from foreplan.export.table import writes
from foreplan.graph import TensorType
from foreplan.graph.types import FLOAT32, INT64, DType
from foreplan.ops.first_equal import FirstEqual
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.index_elements import GatherElements, ScatterElementsAdd
from foreplan.ops.scan import CumSum
from foreplan.ops.scatter_reduce import ScatterReduce
from foreplan.ops.sort import ArgReduce, TopK


def _indices(e: Emitter, x: str, type: TensorType) -> str:
    return x if type.dtype.name in ("int32", "int64") else e.cast(x, type.dtype, INT64)


@writes(Gather)
def _gather(e: Emitter, op: Gather, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.op("Gather", x[0], _indices(e, x[1], types[1]), axis=op.axis)]


@writes(GatherElements)
def _gather_elements(e: Emitter, op: GatherElements, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.op("GatherElements", x[0], _indices(e, x[1], types[1]), axis=op.axis)]


@writes(ScatterElementsAdd)
def _scatter_elements(e: Emitter, op: ScatterElementsAdd, x: list[str], types: list[TensorType]) -> list[str]:
    own, wide = types[1].dtype, types[1].dtype.wide
    zeros, g = e.zeros(TensorType(wide, op.shape)), e.cast(x[1], own, wide)
    y = e.op("ScatterElements", zeros, _indices(e, x[0], types[0]), g, axis=op.axis, reduction="add")
    return [e.cast(y, wide, own)]


@writes(ScatterAdd)
def _scatter_add(e: Emitter, op: ScatterAdd, x: list[str], types: list[TensorType]) -> list[str]:
    return _scatter(e, op, x, types, "add")


@writes(ScatterReduce)
def _scatter_reduce(e: Emitter, op: ScatterReduce, x: list[str], types: list[TensorType]) -> list[str]:
    return _scatter(e, op, x, types, op.how)


def _scatter(e: Emitter, op: ScatterAdd, x: list[str], types: list[TensorType], how: str) -> list[str]:
    """By ScatterND, which wants the axis in front."""
    (indices, updates), rank, lead = types[:2], len(op.shape), types[0].rank
    turned = [op.axis, *range(op.axis), *range(op.axis + 1, rank)]
    behind = [*range(op.axis, op.axis + lead), *range(op.axis), *range(op.axis + lead, updates.rank)]
    own, wide = updates.dtype, updates.dtype.wide
    base = e.cast(x[2], own, wide) if len(x) > 2 else e.zeros(TensorType(wide, op.shape))
    at = e.reshape(e.cast(x[0], indices.dtype, INT64), (*indices.shape, 1))
    rows = e.transpose(e.cast(x[1], own, wide), behind)
    y = e.op("ScatterND", e.transpose(base, turned), at, rows, reduction=how)
    return [e.cast(e.transpose(y, [turned.index(axis) for axis in range(rank)]), wide, own)]


@writes(FirstEqual)
def _first_equal(e: Emitter, op: FirstEqual, x: list[str], types: list[TensorType]) -> list[str]:
    at = e.op("Mod", e.cast(x[0], types[0].dtype, INT64), e.scalar(op.extent, INT64))
    _, firsts, which, _ = e.node("Unique", [at], 4)
    return [e.op("Gather", firsts, which, axis=0)]


@writes(CumSum)
def _cumsum(e: Emitter, op: CumSum, x: list[str], types: list[TensorType]) -> list[str]:
    own = types[0].dtype
    wide = own.wide if own.is_float else INT64
    y = e.cast(x[0], own, wide)
    y = e.op("CumSum", y, e.scalar(op.axis, INT64), exclusive=int(op.exclusive), reverse=int(op.reverse))
    return [e.cast(y, wide, own)]


def _ordered(dtype: DType) -> DType:
    """A type that engines sort, which has the elements of another one in their order."""
    if dtype.is_float:
        return dtype.wide
    return dtype if dtype.name in ("int32", "int64", "uint64") else INT64


@writes(ArgReduce)
def _arg_reduce(e: Emitter, op: ArgReduce, x: list[str], types: list[TensorType]) -> list[str]:
    own = types[0].dtype
    wide = FLOAT32 if own.name == "bool" else _ordered(own)
    y = e.cast(x[0], own, wide)
    name = {"max": "ArgMax", "min": "ArgMin"}[op.how]
    return [e.op(name, y, axis=op.axis, keepdims=int(op.keepdims), select_last_index=int(op.last))]


@writes(TopK)
def _top_k(e: Emitter, op: TopK, x: list[str], types: list[TensorType]) -> list[str]:
    own, wide = types[0].dtype, _ordered(types[0].dtype)
    y = e.cast(x[0], own, wide)
    values, places = e.node("TopK", [y, e.ints([op.k])], 2, axis=op.axis, largest=int(op.largest), sorted=1)
    return [e.cast(values, wide, own), places]
