"""Values known at import: shapes and what is computed from them, evaluated by ONNX's own reference implementation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np

from foreplan.errors import ForeplanError
from foreplan.frontend.onnx.node import OnnxNode
from foreplan.frontend.onnx.tensors import Constant, dtype_of, filled, from_array, known_bytes
from foreplan.frontend.onnx.wire import INTEGER_BYTES
from foreplan.graph import TensorType, as_dtype
from foreplan.graph.ir import Kind

# Not functions of their inputs alone, or better built than folded.
_NEVER = {
    "Bernoulli",
    "Dropout",
    "If",
    "Loop",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Scan",
}
# Ops whose output can be far larger than all their inputs → bytes that it would have, judged by the known inputs.
_GROWING = {"Expand", "Tile", "OneHot", "EyeLike", "Pad", "Resize", "Upsample", "Range", "CenterCropPad"}


def fold(n: OnnxNode, kind: Kind) -> list[Constant] | None:
    """The outputs of a node whose inputs are all known, or whose output depends on shapes alone; None for others.

    Args:
        n: the node.
        kind: the role of its first output, where that is filled with one number and never looked at.
    """
    if n.proto.domain not in ("", "ai.onnx"):
        return None
    if n.op_type in ("Shape", "Size"):
        return [_shape(n)]
    if n.op_type == "ConstantOfShape":
        return [_constant_of_shape(n, kind)]
    constants = [operand for operand in n.inputs if operand is not None]
    if not constants or n.op_type in _NEVER or any(attribute.HasField("g") for attribute in n.proto.attribute):
        return None
    if not all(isinstance(operand, Constant) and operand.is_foldable for operand in constants):
        return None
    if n.op_type in _GROWING and _grown_bytes(n) > INTEGER_BYTES:
        return None
    arrays = _reference(n)
    if arrays is None:
        return None
    return [from_array(name, array) for name, array in zip(n.output_names, arrays)]


def _shape(n: OnnxNode) -> Constant:
    shape = n.shape(0)
    if n.op_type == "Size":
        return from_array(n.output_names[0], np.array(math.prod(shape), np.int64))
    # Bounds beyond the axes are clamped as Python clamps those of a slice.
    return from_array(n.output_names[0], np.array(shape[n.integer("start", 0) : n.integer("end", None)], np.int64))


def _constant_of_shape(n: OnnxNode, kind: Kind) -> Constant:
    from onnx import numpy_helper

    shape = tuple(n.known_ints(0))
    if any(extent < 0 for extent in shape):
        raise n.misshapen(f"an extent of {list(shape)} is negative")
    tensor = n.tensor("value")
    if tensor is None:
        return filled(n.output_names[0], TensorType(as_dtype("float32"), shape), 0.0, kind)
    dtype = as_dtype(dtype_of(tensor.data_type, n.source))
    content = numpy_helper.to_array(tensor).reshape(-1)
    if content.size != 1:
        raise n.fail(f"its value must be one number, and has {content.size}")
    return filled(n.output_names[0], TensorType(dtype, shape), content[0].item(), kind)


def _grown_bytes(n: OnnxNode) -> float:
    """An upper bound of the bytes of the first output, from the numbers among the inputs."""
    if n.op_type == "Range":
        start, limit, delta = (n.known_scalar(i) for i in range(3))
        return 8 * abs(limit - start) / abs(delta) if delta else 0
    if n.op_type == "EyeLike":
        return 8 * math.prod(n.shape(0))
    numbers = [abs(float(x)) for i in range(1, len(n.inputs)) if n.has(i) for x in n.known(i).reshape(-1)]
    largest = 8.0 * max(math.prod(n.shape(0)), 1)
    for number in numbers:
        largest *= max(number, 1.0) if n.op_type != "Pad" else number + 1.0
        if largest > INTEGER_BYTES:
            break
    return largest


def _reference(n: OnnxNode) -> Sequence[np.ndarray] | None:
    """The outputs by onnx.reference; None where it cannot, or where they are too large to be kept in sight."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    node = onnx.NodeProto()
    node.CopyFrom(n.proto)
    feeds = {}
    for i, operand in enumerate(n.inputs):
        if operand is not None:
            node.input[i] = f"x{i}"
            feeds[f"x{i}"] = n.known(i)
    wanted = [name for name in node.output if name]
    try:
        graph = onnx.helper.make_graph(
            [node],
            "fold",
            [
                onnx.helper.make_tensor_value_info(k, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
                for k, v in feeds.items()
            ],
            [onnx.ValueInfoProto(name=name) for name in wanted],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", n.opset)])
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results = dict(zip(wanted, ReferenceEvaluator(model).run(None, feeds)))
        arrays = [np.asarray(results[name]) if name else np.zeros(0, np.float32) for name in node.output]
        fits = all(array.nbytes <= known_bytes(TensorType(as_dtype(array.dtype), array.shape)) for array in arrays)
    except (
        ForeplanError,
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ):
        return None  # the translation says what is wrong, or can do it
    return arrays if fits else None
