"""Values known at import: shapes, and values computed from them.

A node is folded by its op's translation and NumPy kernels, so that it means the same as a node that data reach. Ops
without a translation are folded by ONNX's reference implementation. It is not used for others, because it gives several
ops the meaning of the newest opset, whatever the model's opset.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foreplan.base.errors import ForeplanError, UnsupportedError
from foreplan.base.untrusted import Allowance
from foreplan.frontend.onnx.batch import Rebatch
from foreplan.frontend.onnx.load import domain_of
from foreplan.frontend.onnx.node import TRANSLATIONS, OnnxNode, Operand
from foreplan.frontend.onnx.tensors import Constant, filled, from_array
from foreplan.frontend.onnx.wire import INTEGER_BYTES
from foreplan.graph import Builder, GraphBuilder, TensorType, Value, as_dtype
from foreplan.graph.value import Kind
from foreplan.ops.evaluate import content, evaluate

# Ops that depend on more than their inputs, or that the importer expands.
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
# Ops that no graph can compute, and whose output is not far larger than their inputs, or has a size that these tell.
_BY_REFERENCE = {"MelWeightMatrix", "NonMaxSuppression", "NonZero", "Range", "Unique"}
_PLAIN = (1, 2, 3, 6, 7, 8)  # AttributeProto's FLOAT, INT, STRING and lists of them
_MOST_BYTES = 8 * INTEGER_BYTES  # of an intermediate result


def fold(n: OnnxNode, kind: Kind, allowance: Allowance) -> list[Constant | None] | None:
    """The outputs of a node whose inputs are all known, or whose output depends on shapes alone; None for others.

    Args:
        n: the node.
        kind: the role of its output, if it is a ConstantOfShape.
        allowance: of the file, for results and the time that they take; a node beyond it is folded no more.
    """
    if domain_of(n.proto.domain):
        return None
    if n.op_type in ("Shape", "Size"):
        return [_shape(n)]
    if n.op_type == "ConstantOfShape":
        return [_constant_of_shape(n, kind)]
    read = n.inputs[:1] if n.op_type == "CastLike" else n.inputs  # of the other input it reads the type
    constants = [operand for operand in read if operand is not None]
    if not constants or n.op_type in _NEVER or any(attribute.HasField("g") for attribute in n.proto.attribute):
        return None
    if not all(isinstance(operand, Constant) and operand.is_foldable for operand in constants):
        return None
    arrays: Sequence[np.ndarray | None] | None = None
    if n.op_type in _BY_REFERENCE:
        arrays = _reference(n) if _fits_in_sight(n) else None
    elif ("", n.op_type) in TRANSLATIONS:
        arrays = _translated(n, allowance)
    if arrays is None or not allowance.has(sum(array.nbytes for array in arrays if array is not None)):
        return None
    found = [None if array is None else from_array(name, array) for name, array in zip(n.output_names, arrays)]
    missing = any(n.wants(i) and (one is None or one.array is None) for i, one in enumerate(found))
    return None if missing or len(found) < n.output_count else found


def _shape(n: OnnxNode) -> Constant:
    shape = n.shape(0)
    if n.op_type == "Size":
        return from_array(n.output_names[0], np.array(math.prod(shape), np.int64))
    # Bounds beyond the axes are clamped as Python clamps those of a slice.
    return from_array(n.output_names[0], np.array(shape[n.integer("start", 0) : n.integer("end", None)], np.int64))


def _constant_of_shape(n: OnnxNode, kind: Kind) -> Constant:
    shape = tuple(n.known_ints(0))
    if any(extent < 0 for extent in shape):
        raise n.misshapen(f"an extent of {list(shape)} is negative")
    tensor = n.tensor("value")
    if tensor is None:
        return filled(n.output_names[0], TensorType(as_dtype("float32"), shape), 0.0, kind)
    if tensor.type.size != 1 or tensor.array is None:
        raise n.fail(f"its value must be one number, and is {tensor.type}")
    return filled(n.output_names[0], tensor.type.with_shape(shape), tensor.array.item(), kind)


class _Apart:
    """A graph apart, in which a translation builds the node that is folded, and which is then computed."""

    def __init__(self, path: Path | None) -> None:
        self.b: Builder = GraphBuilder("folded")
        self.path = path
        self.batch: Rebatch | None = None  # what is known at import has no batch
        self.known: dict[Value, np.ndarray] = {}
        self.floats: dict[str, Value] = {}
        self._values: dict[Constant, Value] = {}

    def store(self, operand: Operand, taken: Value | None = None) -> Value:
        """A constant's content under a value of this graph."""
        if isinstance(operand, Value):
            return operand
        if operand not in self._values:
            self._values[operand] = self.b.store(operand.name, operand.type, Kind.CONSTANT, operand.init)
        return self._values[operand]

    def sources(self, value: Value) -> Sequence[Value]:
        """None: all is known here."""
        return ()

    def random_stream(self) -> tuple[Value, int]:
        """Nothing random is folded."""
        raise UnsupportedError("a random tensor is not known at import")

    def array(self, operand: Operand | None) -> np.ndarray | None:
        """The content of a result; None if it is too large, or if there is no result."""
        if operand is None:
            return None
        if isinstance(operand, Constant):
            return operand.array
        return self.known.get(operand)


def _translated(n: OnnxNode, allowance: Allowance) -> Sequence[np.ndarray | None] | None:
    """The outputs by the op's translation; None if it has none for these inputs, or if an output is too large."""
    apart = _Apart(n.path)
    alone = OnnxNode(n.proto, n.inputs, n.opset, n.source, apart, n.input_names, n.output_names)
    try:
        with np.errstate(all="ignore"):
            result = TRANSLATIONS["", n.op_type](alone)
            if result is None or alone.updates:
                return None
            apart.known.update((value, content(value)) for value in apart.b.stored)
            if not evaluate(apart.b.nodes, apart.known, _MOST_BYTES, allowance.has_work):
                return None
    except (ForeplanError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, AssertionError):
        return None  # when it is called for the graph itself, the translation says what is wrong
    return [apart.array(operand) for operand in ([result] if isinstance(result, Value | Constant) else result)]


def _fits_in_sight(n: OnnxNode) -> bool:
    """Whether an op that makes a tensor from numbers makes one small enough to be known at import."""
    if n.op_type == "Range":
        start, limit, delta = (n.known_scalar(i) for i in range(3))
        return not delta or 8 * abs(limit - start) / abs(delta) <= INTEGER_BYTES
    if n.op_type == "MelWeightMatrix":
        return 8 * abs(n.known_scalar(0) * (n.known_scalar(1) + 2)) <= INTEGER_BYTES
    return True


def _reference(n: OnnxNode) -> Sequence[np.ndarray | None] | None:
    """The outputs by onnx.reference; None if it fails."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    if any(attribute.type not in _PLAIN for attribute in n.proto.attribute):
        return None  # a tensor attribute may name any file, which it would read
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
        return [np.asarray(results[name]) if name else None for name in node.output]
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # the translation says what is wrong, or can do it
