"""Which constants of a model are trained: their readers decide, before anything is translated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from foreplan.errors import ForeplanError
from foreplan.frontend.onnx.tensors import from_tensor
from foreplan.graph.ir import Kind

if TYPE_CHECKING:
    import onnx

# Op → the inputs that are weights, without running statistics.
_WEIGHT_SLOTS: dict[str, tuple[int, ...]] = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "FusedMatMul": (0, 1),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "SimplifiedLayerNormalization": (1,),
    "RMSNormalization": (1,),
    "PRelu": (1,),
    "Gather": (0,),
    "RNN": (1, 2, 3),
    "GRU": (1, 2, 3),
    "LSTM": (1, 2, 3, 7),
    "Einsum": tuple(range(8)),
}
_BUFFER_SLOTS = {"BatchNormalization": (3, 4)}
# Ops that may add a bias or multiply by a gain. A constant in a difference or a quotient stays a constant: it
# normalises data far more often than it is learned.
_BIAS_OPS = {"Add", "Mul", "Sum"}
# Ops through whose first input (all inputs for Concat) a learned tensor that is not a matrix reaches the data.
_CARRIERS = {"Expand", "Concat", "Tile"}
_REARRANGING = {"Identity", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Split", "Slice"}
_SHAPES = {"ConstantOfShape", "Shape", "Size"}  # their result holds no element of their input


def find_roles(
    nodes: Iterable[onnx.NodeProto],
    initializers: Iterable[onnx.TensorProto] = (),
    functions: Mapping[tuple[str, str], onnx.FunctionProto] | None = None,
) -> dict[str, Kind]:
    """The role of each constant of one scope that is a PARAMETER or a BUFFER; all others are CONSTANT.

    A weight that reaches its slot through other constants (a transposed matrix, a reshaped scale, a weight that is
    a norm times a direction) makes parameters of the constants that it was computed from. Only tensors of floats can be
    trained; this is checked where they are stored.
    """
    search = _Search(functions or {})
    for tensor in initializers:
        search.learned.add(tensor.name)
        search.note_tensor(tensor.name, tensor)
    for node in nodes:
        search.visit(node)
    return search.roles


class _Search:
    """One pass over nodes in order; constants come before what reads them."""

    def __init__(self, functions: Mapping[tuple[str, str], onnx.FunctionProto], is_function: bool = False) -> None:
        self.functions = functions
        self.is_function = is_function
        self.constants: set[str] = set()
        self.learned: set[str] = set()  # initializers, and mere rearrangements of them
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.contents: dict[str, onnx.TensorProto] = {}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.roles: dict[str, Kind] = {}
        self.slots: dict[tuple[str, str], frozenset[int]] = {}

    def visit(self, node: onnx.NodeProto) -> None:
        for index, kind in self.weight_slots(node):
            if index < len(node.input) and node.input[index] in self.constants:
                self.claim(node.input[index], kind)
        inputs = [name for name in node.input if name]
        first = node.input[0] if node.input else ""
        if all(name in self.constants for name in inputs) and not _subgraphs(node):
            for name in node.output:
                self.constants.add(name)
                self.makers[name] = node
                if node.op_type in _REARRANGING | _CARRIERS and first in self.learned:
                    self.learned.add(name)
            self.note_shape(node)
        for graph in _subgraphs(node):
            for tensor in graph.initializer:
                self.note_tensor(tensor.name, tensor)
            for inner in graph.node:
                self.visit(inner)

    def weight_slots(self, node: onnx.NodeProto) -> Iterator[tuple[int, Kind]]:
        function = self.functions.get((node.domain, node.op_type))
        if function is not None:
            yield from ((i, Kind.PARAMETER) for i in self.function_slots(function))
            return
        yield from ((i, Kind.PARAMETER) for i in _WEIGHT_SLOTS.get(node.op_type, ()))
        yield from ((i, Kind.BUFFER) for i in _BUFFER_SLOTS.get(node.op_type, ()))
        meets_data = any(name and name not in self.constants for name in node.input)
        if node.op_type in _BIAS_OPS and meets_data:
            yield from ((i, Kind.PARAMETER) for i, name in enumerate(node.input) if self.is_bias(name))
        elif node.op_type in _CARRIERS and meets_data:
            yield from ((i, Kind.PARAMETER) for i, name in enumerate(node.input) if name in self.learned)

    def is_bias(self, name: str) -> bool:
        """A vector (one axis longer than 1) from anywhere, or an initializer of more than one element."""
        shape = self.shapes.get(name)
        if shape is None:
            return name in self.learned
        return sum(extent != 1 for extent in shape) == 1 or (name in self.learned and math.prod(shape) > 1)

    def claim(self, name: str, kind: Kind) -> None:
        """Give a constant its role, and the same role to the constants that it was computed from."""
        pending = [name]
        while pending:
            name = pending.pop()
            if name not in self.constants or self.roles.get(name) in (kind, Kind.PARAMETER):
                continue
            self.roles[name] = kind
            maker = self.makers.get(name)
            # Within a function every tensor may be an activation: only weights by their place are followed back.
            if maker is None or maker.op_type in _SHAPES or (self.is_function and maker.op_type not in _REARRANGING):
                continue
            pending += [source for source in maker.input if source]

    def note_tensor(self, name: str, tensor: onnx.TensorProto) -> None:
        self.constants.add(name)
        self.shapes[name] = tuple(tensor.dims)
        if tensor.data_type == tensor.INT64 and tensor.data_location == tensor.DEFAULT:
            self.contents[name] = tensor

    def note_shape(self, node: onnx.NodeProto) -> None:
        """The shapes of constants, as far as biases need them. Errors in them are left to the import."""
        if not node.output:
            return
        first = node.input[0] if node.input else ""
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            self.note_tensor(node.output[0], attributes["value"].t)
        elif node.op_type == "Constant" and "value_floats" in attributes:
            self.shapes[node.output[0]] = (len(attributes["value_floats"].floats),)
        elif node.op_type in ("Unsqueeze", "Identity", "Reshape", "Cast") and first in self.shapes:
            # Axes of extent 1 do not matter: `is_bias` only counts longer ones.
            self.shapes[node.output[0]] = self.shapes[first]
        elif node.op_type == "ConstantOfShape" and first in self.contents:
            with contextlib.suppress(ForeplanError):
                extents = from_tensor(self.contents[first], first, None, first, Kind.CONSTANT).array
                if extents is not None:
                    self.shapes[node.output[0]] = tuple(int(x) for x in extents.reshape(-1))

    def function_slots(self, function: onnx.FunctionProto) -> frozenset[int]:
        """The inputs of a model's own function that are weights inside it."""
        key = (function.domain, function.name)
        if key not in self.slots:
            self.slots[key] = frozenset()  # until it is found: a function that calls itself has none
            inner = _Search(self.functions, is_function=True)
            inner.slots = self.slots
            inner.constants.update(function.input)
            for node in function.node:
                inner.visit(node)
            self.slots[key] = frozenset(i for i, name in enumerate(function.input) if name in inner.roles)
        return self.slots[key]


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]
