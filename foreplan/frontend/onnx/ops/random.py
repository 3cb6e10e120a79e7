"""Dropout and ONNX's random tensors, drawn from one state that a step moves on."""

from __future__ import annotations

from foreplan.frontend.onnx.node import OnnxNode, Operand, Result, translates
from foreplan.frontend.onnx.tensors import dtype_of, filled
from foreplan.graph import DType, TensorType, as_dtype
from foreplan.ops.map import elementwise
from foreplan.ops.random import Random, dropout, dropped


@translates("Dropout")
def _dropout(n: OnnxNode) -> Result:
    """Active in training steps only; with training_mode true (opset 12 or later) in every step, as in ONNX."""
    active = False
    if n.opset < 12:
        ratio = n.number("ratio", 0.5)
    else:
        ratio = float(n.known_scalar(1)) if n.has(1) else 0.5
        active = n.has(2) and bool(n.known_scalar(2))
    if not 0 <= ratio < 1:
        raise n.fail(f"its ratio must be at least 0 and below 1, and is {ratio}")
    if active and ratio:
        n.b.note(f"{n.source}: training_mode is true, so it drops in inference as well; export the model for inference")
        y, mask = dropped(n.b, n.value(0), ratio, *n.random_stream())
        return [y, mask]
    y = dropout(n.b, n.value(0), ratio)
    if not n.wants(1):
        return y
    dtype = as_dtype("bool") if n.opset >= 10 else y.dtype
    return [y, filled(n.output_names[1], TensorType(dtype, y.shape), 1)]


def _dtype(n: OnnxNode, default: DType) -> DType:
    return as_dtype(dtype_of(n.integer("dtype"), n.where)) if n.has_attribute("dtype") else default


@translates("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike")
def _random(n: OnnxNode) -> Operand:
    if n.op_type.endswith("Like"):
        shape, dtype = n.shape(0), _dtype(n, n.type(0).dtype)
    else:
        shape, dtype = tuple(n.integers("shape", ())), _dtype(n, as_dtype("float32"))
    state, stream = n.random_stream()
    if "Normal" in n.op_type:
        op = Random("normal", shape, dtype, stream, mean=n.number("mean", 0.0), std=n.number("scale", 1.0))
    else:
        op = Random("uniform", shape, dtype, stream, low=n.number("low", 0.0), high=n.number("high", 1.0))
    return n.b.apply(op, state)


@translates("Bernoulli")
def _bernoulli(n: OnnxNode) -> Operand:
    p = n.value(0)
    state, stream = n.random_stream()
    drawn = n.b.apply(Random("uniform", p.shape, p.dtype, stream), state)
    return elementwise(n.b, lambda u, p: u < p, drawn, p, dtype=_dtype(n, p.dtype))
