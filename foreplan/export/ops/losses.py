"""Cross-entropy of class indices, and its gradient."""

from __future__ import annotations

import numpy as np

from foreplan.export.emitter import Emitter
from foreplan.export.table import writes
from foreplan.graph import TensorType
from foreplan.graph.types import BOOL, INT64
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad


@writes(CrossEntropy)
def _cross_entropy(e: Emitter, op: CrossEntropy, x: list[str], types: list[TensorType]) -> list[str]:
    own, wide, axis = types[0].dtype, types[0].dtype.wide, e.ints([op.axis])
    logits = e.cast(x[0], own, wide)
    high = e.op("ReduceMax", logits, axis, keepdims=1)
    total = e.op("ReduceSum", e.op("Exp", e.op("Sub", logits, high)), axis, keepdims=1)
    log = e.op("Log", total)
    target, ignored = _targets(e, op, x[1], types[1])
    picked = e.op("GatherElements", logits, target, axis=op.axis)
    loss = e.op("Add", e.op("Sub", high, picked), log)
    loss = e.op("Where", ignored, e.scalar(0, wide), loss)
    return [e.op("Squeeze", each, axis) for each in (loss, e.op("Add", high, log))]


def _targets(e: Emitter, op: CrossEntropy | CrossEntropyGrad, x: str, type: TensorType) -> tuple[str, str]:
    """Classes with an axis for them, 0 where the target is to be ignored; and where that is."""
    target = e.op("Unsqueeze", e.cast(x, type.dtype, INT64), e.ints([op.axis]))
    ignored = e.op("Equal", target, e.scalar(op.ignore_index, INT64))
    return e.op("Where", ignored, e.scalar(0, INT64), target), ignored


@writes(CrossEntropyGrad)
def _cross_entropy_grad(e: Emitter, op: CrossEntropyGrad, x: list[str], types: list[TensorType]) -> list[str]:
    own, wide, axis = types[0].dtype, types[0].dtype.wide, e.ints([op.axis])
    target, ignored = _targets(e, op, x[1], types[1])
    lse, g = (e.op("Unsqueeze", each, axis) for each in x[2:])
    classes = np.arange(types[0].shape[op.axis]).reshape(-1, *[1] * (types[0].rank - 1 - op.axis))
    hot = e.cast(e.op("Equal", target, e.constant(classes)), BOOL, wide)
    p = e.op("Exp", e.op("Sub", e.cast(x[0], own, wide), lse))
    weight = e.op("Where", ignored, e.scalar(0, wide), g)
    return [e.cast(e.op("Mul", e.op("Sub", p, hot), weight), wide, own)]
