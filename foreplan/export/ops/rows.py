"""Reductions, and ops of rows and channels that ONNX has as a whole; others are decomposed."""

from __future__ import annotations

import numpy as np

from foreplan.export.emitter import Emitter
from foreplan.export.table import Types, writes
from foreplan.graph import TensorType
from foreplan.graph.types import DTYPES, FLOAT32, INT64
from foreplan.ops.norm.batch import BatchNorm
from foreplan.ops.norm.rows import LayerNorm
from foreplan.ops.reduce import Reduce
from foreplan.ops.softmax import LogSoftmax, Softmax

_REDUCTIONS = {"sum": "ReduceSum", "mean": "ReduceMean", "prod": "ReduceProd", "max": "ReduceMax", "min": "ReduceMin"}
_OF_TRUTHS = {"sum": "max", "prod": "min", "max": "max", "min": "min"}


@writes(Reduce)
def _reduce(e: Emitter, op: Reduce, x: list[str], types: list[TensorType]) -> list[str]:
    (own,), (result,), how = [types[0].dtype], [op.infer(types)[0].dtype], op.how
    if own.is_float:
        wide = own.wide if how in ("sum", "mean", "prod") or op.wide else own
    elif own.category == "bool":
        wide, how = DTYPES["int32"], _OF_TRUTHS[how]
    else:
        wide = own if own.name == "uint64" else INT64
    y = e.cast(x[0], own, wide)
    if op.axes:
        y = e.op(_REDUCTIONS[how], y, e.ints(op.axes), keepdims=int(op.keepdims))
    return [e.cast(y, wide, result)]


@writes(Softmax, where=lambda op, types: types[0].rank > 0)
def _softmax(e: Emitter, op: Softmax, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.op("Softmax", x[0], axis=op.axis)]


@writes(LogSoftmax, where=lambda op, types: types[0].rank > 0)
def _log_softmax(e: Emitter, op: LogSoftmax, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.op("LogSoftmax", x[0], axis=op.axis)]


def _is_float32(op: object, types: Types) -> bool:
    return all(type.dtype == FLOAT32 for type in types)


@writes(LayerNorm, where=_is_float32)
def _layer_norm(e: Emitter, op: LayerNorm, x: list[str], types: list[TensorType]) -> list[str]:
    shape = types[0].shape
    scale = x[1:2] or [e.expand(e.constant(np.ones((), np.float32)), (), shape[op.axis :])]
    made = e.node("LayerNormalization", [x[0], *scale, *x[2:]], 3, axis=op.axis, epsilon=op.epsilon)
    return [made[0], *(e.reshape(each, shape[: op.axis]) for each in made[1:])]


@writes(BatchNorm, where=_is_float32)
def _batch_norm(e: Emitter, op: BatchNorm, x: list[str], types: list[TensorType]) -> list[str]:
    return [e.op("BatchNormalization", *x, epsilon=op.epsilon)]
