"""ONNX ops along axes: reductions, softmax, positions of extremes, cumulative sums."""

from __future__ import annotations

import math

from foreplan.frontend.onnx.node import OnnxNode, Operand, Result, translates
from foreplan.frontend.onnx.tensors import filled
from foreplan.graph import TensorType, Value
from foreplan.ops.determinant import det
from foreplan.ops.expr import Expr, call, exp, log, sqrt, where
from foreplan.ops.index import one_hot
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.ops.scan import cumprod, cumsum
from foreplan.ops.shape import reshape
from foreplan.ops.softmax import log_softmax, softmax
from foreplan.ops.sort import arg_reduce, top_k

# Op → (function of each element, reduction, function of the result).
_REDUCTIONS = {
    "ReduceSum": (None, "sum", None),
    "ReduceMean": (None, "mean", None),
    "ReduceMax": (None, "max", None),
    "ReduceMin": (None, "min", None),
    "ReduceProd": (None, "prod", None),
    "ReduceL1": (lambda x: call("abs", x), "sum", None),
    "ReduceL2": (lambda x: x * x, "sum", sqrt),
    "ReduceSumSquare": (lambda x: x * x, "sum", None),
    "ReduceLogSum": (None, "sum", log),
}


def _axes(n: OnnxNode) -> tuple[int, ...] | None:
    """The axes to reduce, ascending; None if there are none to reduce."""
    rank = len(n.shape(0))
    by_input = n.opset >= (13 if n.op_type == "ReduceSum" else 18)
    if by_input:
        given = n.known_ints(1) if n.has(1) else []
    else:
        given = n.integers("axes", [])
    if not given:
        return None if n.integer("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(n.axes(given, rank)))


@translates(*_REDUCTIONS)
def _reduce(n: OnnxNode) -> Operand:
    before, how, after = _REDUCTIONS[n.op_type]
    dtype = n.type(0).dtype
    axes = _axes(n)
    if axes is None and n.op_type in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
        return n.operand(0)
    x = n.value(0) if before is None else n.as_value(n.map(before, 0))
    y = x if axes is None else reduced(n, how, x, axes)
    return elementwise(n.b, after, y, dtype=dtype) if after is not None else y


def reduced(n: OnnxNode, how: str, x: Value, axes: tuple[int, ...]) -> Value:
    """One reduction with the node's `keepdims`, also of integers and of no elements, as ONNX defines them."""
    keep = bool(n.integer("keepdims", 1))
    if x.type.size == 0:
        shape = [1 if i in axes else extent for i, extent in enumerate(x.shape) if keep or i not in axes]
        return n.as_value(filled(n.output_names[0], x.type.with_shape(tuple(shape)), _of_nothing(how, x.type)))
    if how == "mean" and not x.dtype.is_float:
        count = math.prod(x.shape[axis] for axis in axes)
        return elementwise(n.b, lambda s: call("truncdiv", s, count), reduce(n.b, "sum", x, axes, keep), dtype=x.dtype)
    return reduce(n.b, how, x, axes, keep)


def _of_nothing(how: str, type: TensorType) -> float:
    """The result of a reduction of no elements."""
    import numpy as np

    if how in ("sum", "prod"):
        return 0 if how == "sum" else 1
    if how == "mean":
        return math.nan if type.dtype.is_float else 0
    if type.dtype.is_float:
        return -math.inf if how == "max" else math.inf
    if type.dtype.name == "bool":
        return how == "min"
    limits = np.iinfo(type.dtype.numpy)
    return int(limits.min if how == "max" else limits.max)


@translates("ReduceLogSumExp")
def _reduce_log_sum_exp(n: OnnxNode) -> Operand:
    axes = _axes(n)
    x = n.value(0)
    if axes is None:
        return x
    if x.type.size == 0:
        return elementwise(n.b, log, reduced(n, "sum", x, axes), dtype=x.dtype)
    top = reduce(n.b, "max", x, axes, keepdims=True)
    finite = elementwise(n.b, lambda t: where(call("isinf", t), 0.0, t), top)
    total = reduce(n.b, "sum", elementwise(n.b, lambda x, t: exp(x - t), x, finite), axes, keepdims=True)
    result = elementwise(n.b, lambda s, t: log(s) + t, total, finite, dtype=x.dtype)
    kept = bool(n.integer("keepdims", 1))
    return result if kept else reshape(n.b, result, [e for i, e in enumerate(x.shape) if i not in axes])


@translates("LpNormalization")
def _lp_normalization(n: OnnxNode) -> Operand:
    x = n.value(0)
    axis, power = n.axis(n.integer("axis", -1), len(x.shape)), n.integer("p", 2)
    if power not in (1, 2):
        raise n.fail(f"p must be 1 or 2, and is {power}")
    parts = elementwise(n.b, lambda x: call("abs", x) if power == 1 else x * x, x)
    total = reduce(n.b, "sum", parts, axis, keepdims=True)

    def divide(x: Expr, s: Expr) -> Expr:
        # If all elements are zero, so is the result.
        norm = s if power == 1 else sqrt(where(call("eq", s, 0.0), 1.0, s))
        return x / where(call("eq", s, 0.0), 1.0, norm)

    return elementwise(n.b, divide, x, total)


@translates("Softmax", "LogSoftmax", "Hardmax")
def _softmax(n: OnnxNode) -> Operand:
    x = n.value(0)
    rank = len(x.shape)
    if rank == 0:
        raise n.misshapen("a softmax needs at least one axis")
    if n.opset >= 13:
        return _along(n, x, n.axis(n.integer("axis", -1), rank))
    # Before opset 13 the axes from `axis` on count as one.
    axis = n.border(n.integer("axis", 1), rank)
    if axis == rank - 1:
        return _along(n, x, axis)
    rows = reshape(n.b, x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return reshape(n.b, _along(n, rows, 1), x.shape)


def _along(n: OnnxNode, x: Value, axis: int) -> Value:
    if n.op_type == "Softmax":
        return softmax(n.b, x, axis)
    if n.op_type == "LogSoftmax":
        return log_softmax(n.b, x, axis)
    return one_hot(n.b, arg_reduce(n.b, "max", x, axis), x.shape[axis], axis, x.dtype)


@translates("ArgMax", "ArgMin")
def _arg(n: OnnxNode) -> Operand:
    axis = n.axis(n.integer("axis", 0), len(n.shape(0)))
    keep, last = bool(n.integer("keepdims", 1)), bool(n.integer("select_last_index", 0))
    return arg_reduce(n.b, "max" if n.op_type == "ArgMax" else "min", n.value(0), axis, keep, last)


@translates("TopK")
def _top_k(n: OnnxNode) -> Result:
    k = n.integer("k") if n.opset < 10 else int(n.known_scalar(1))
    return top_k(n.b, n.value(0), k, n.integer("axis", -1), bool(n.integer("largest", 1)))


@translates("CumSum", "CumProd")
def _cumulative(n: OnnxNode) -> Operand:
    along = cumsum if n.op_type == "CumSum" else cumprod
    axis = n.axis(int(n.known_scalar(1)), len(n.shape(0)))
    return along(n.b, n.value(0), axis, bool(n.integer("exclusive", 0)), bool(n.integer("reverse", 0)))


@translates("Det")
def _det(n: OnnxNode) -> Operand:
    return det(n.b, n.value(0))
