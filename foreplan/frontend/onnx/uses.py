"""What the constants of a model are used for, before anything is translated.

A constant that is computed from others, such as a transposed matrix, is used as they are: a use is told of the tensors
that stand in the file, and says whether these were merely rearranged on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from foreplan.errors import ForeplanError
from foreplan.frontend.onnx.tensors import from_tensor
from foreplan.graph.ir import Kind

if TYPE_CHECKING:
    import onnx

Functions = Mapping[tuple[str, str], "onnx.FunctionProto"]
_REARRANGING = {"Identity", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "CastLike", "Split"}
_REARRANGING |= {"Slice", "Expand", "Concat", "Tile"}
# What an op's output has no gradient for, and masks are made by; and the inputs of others that are mere conditions.
_BLIND = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not", "Xor", "Trilu", "ArgMax"}
_BLIND |= {
    "ArgMin",
    "NonMaxSuppression",
    "NonZero",
    "IsNaN",
    "IsInf",
    "Sign",
    "Floor",
    "Ceil",
    "Round",
    "Shape",
    "Size",
    "OneHot",
}
_CONDITIONS = {("Where", 0), ("Gather", 1), ("GatherElements", 1), ("GatherND", 1), ("Compress", 1)}
_LOOK_UPS = {"Gather", "GatherND", "GatherElements"}
# What biases, scales and shifts follow.
_COMPLETED = {"Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", "InstanceNormalization", "GroupNormalization"}
_COMPLETED |= {"LayerNormalization", "RMSNormalization", "LpNormalization", "Div", "BatchNormalization"}
# From sums of scores and a mask to their softmax.
_TO_SOFTMAX = _REARRANGING | {"Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Clip", "Sum"}
_FARTHEST = 6  # nodes
_WITH_MASK = {"Attention": 3, "MultiHeadAttention": 5}


@dataclass(frozen=True)
class Use:
    """One place in which a tensor is read together with data.

    Attributes:
        op: the reader's operator.
        slot: which of its inputs.
        direct: whether the tensor is read as it is, or merely rearranged.
        blind: whether no gradient comes back from there: comparisons, conditions, indices.
        completes: whether it is added to, or multiplied with, what a contraction or a normalisation gives, as biases,
            scales and shifts are.
        is_mask: whether it is added to scores of which a softmax is taken, or stands in the place of a mask.
        is_basis: whether sines and cosines are both taken of the product with it, as of random features.
        axes: how many axes of what is read are longer than 1; None: this is not known.
    """

    op: str
    slot: int
    direct: bool = True
    blind: bool = False
    completes: bool = False
    is_mask: bool = False
    is_basis: bool = False
    axes: int | None = None


@dataclass
class Uses:
    """The uses of the tensors of one scope, by name.

    Attributes:
        found: by name of an initializer, of a Constant's output, or of a tensor filled with one number.
        initializers: the names of those in `found`.
        held: the tensor of each Constant, and of each initializer.
    """

    found: dict[str, list[Use]] = field(default_factory=dict)
    initializers: set[str] = field(default_factory=set)
    held: dict[str, onnx.TensorProto | None] = field(default_factory=dict)


def find_uses(nodes: Sequence[onnx.NodeProto], initializers: Iterable[onnx.TensorProto], functions: Functions) -> Uses:
    """What the constants of one scope are used for, bodies within its nodes included."""
    walk = _Walk(functions, {})
    for tensor in initializers:
        walk.hold(tensor.name, tensor)
        walk.uses.initializers.add(tensor.name)
    walk.run(nodes)
    return walk.uses


@dataclass(frozen=True)
class _Tensor:
    """A constant: which tensors of the file it comes from, each merely rearranged or not, and its longer axes."""

    roots: Mapping[str, bool]
    axes: int | None


class _Walk:
    """One pass over nodes in order; constants come before what reads them."""

    def __init__(self, functions: Functions, known: dict[object, list[tuple[int, Use]]]) -> None:
        self.functions, self.known = functions, known
        self.uses = Uses()
        self.tensors: dict[str, _Tensor] = {}
        self.extents: dict[str, onnx.TensorProto] = {}
        self.to_softmax: set[str] = set()  # tensors of which a softmax is taken, within `_FARTHEST` nodes
        self.to_waves: set[str] = set()  # those of which the sine and the cosine are
        self.makers: dict[str, onnx.NodeProto] = {}

    def hold(self, name: str, tensor: onnx.TensorProto | None, axes: int | None = None) -> None:
        """A tensor that stands in the file."""
        self.uses.found.setdefault(name, [])
        self.uses.held[name] = tensor
        if tensor is not None:
            axes = sum(extent != 1 for extent in tensor.dims)
            if tensor.data_type == tensor.INT64 and tensor.data_location == tensor.DEFAULT:
                self.extents[name] = tensor
        self.tensors[name] = _Tensor({name: True}, axes)

    def run(self, nodes: Sequence[onnx.NodeProto]) -> None:
        for node in nodes:
            self.makers.update((name, node) for name in node.output)
        softmax, sine, cosine = (
            {name for node in nodes if node.op_type == op for name in node.input} for op in ("Softmax", "Sin", "Cos")
        )
        self.mark(self.to_softmax, softmax, _TO_SOFTMAX)
        self.mark(self.to_waves, sine & cosine, _REARRANGING | {"Mul"})
        for node in nodes:
            self.visit(node)

    def mark(self, marked: set[str], ahead: set[str], ops: Set[str]) -> None:
        """Mark tensors, and those that they were made of by certain ops."""
        for _ in range(_FARTHEST):
            marked |= ahead
            makers = [self.makers[name] for name in ahead if name in self.makers]
            ahead = {name for maker in makers if maker.op_type in ops for name in maker.input} - marked

    def visit(self, node: onnx.NodeProto) -> None:
        bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        inputs = [name for name in node.input if name]
        constant = all(name in self.tensors for name in inputs) and not bodies
        function = self.functions.get((node.domain, node.op_type))
        if function is not None:
            self.call(node, function)
        elif not constant or node.op_type in _LOOK_UPS:  # a table may be looked up by known places
            for slot, name in enumerate(node.input):
                if name in self.tensors:
                    self.note(name, self.use(node, slot))
        if constant:
            self.give(node)
        for body in bodies:
            for tensor in body.initializer:
                self.hold(tensor.name, tensor)
                self.uses.initializers.add(tensor.name)
            self.run(body.node)

    def note(self, name: str, use: Use) -> None:
        tensor = self.tensors[name]
        for root, direct in tensor.roots.items():
            self.uses.found[root].append(replace(use, direct=use.direct and direct, axes=tensor.axes))

    def use(self, node: onnx.NodeProto, slot: int) -> Use:
        op = node.op_type
        blind = op in _BLIND or (op, slot) in _CONDITIONS
        is_mask = _WITH_MASK.get(op) == slot
        if op in ("Add", "Sub", "Sum", "Where"):
            is_mask = not self.to_softmax.isdisjoint(node.output)
        others = [name for i, name in enumerate(node.input) if i != slot]
        completes = op in ("Add", "Mul") and any(map(self.is_completed, others))
        is_basis = op == "MatMul" and not self.to_waves.isdisjoint(node.output)
        return Use(op, slot, blind=blind, completes=completes, is_mask=is_mask, is_basis=is_basis)

    def is_completed(self, name: str) -> bool:
        """Whether data come from a contraction or a normalisation, merely rearranged, scaled or shifted since."""
        for _ in range(_FARTHEST):
            maker = self.makers.get(name)
            if maker is None:
                return False
            if maker.op_type in _COMPLETED:
                return True
            data = [each for each in maker.input if each and each not in self.tensors]
            if maker.op_type not in _REARRANGING | {"Add", "Mul"} or not data:
                return False
            name = data[0]
        return False

    def call(self, node: onnx.NodeProto, function: onnx.FunctionProto) -> None:
        """The uses of what a function of the model's own is given, inside it."""
        given = [self.tensors.get(name) if name else None for name in node.input]
        axes = tuple(-2 if tensor is None else -1 if tensor.axes is None else tensor.axes for tensor in given)
        key = (function.domain, function.name, axes)
        if key not in self.known:
            self.known[key] = []  # until it is found: a function that calls itself has none
            inner = _Walk(self.functions, self.known)
            for formal, each in zip(function.input, given):
                if each is not None:
                    inner.hold(formal, None, each.axes)
            inner.run(function.node)
            self.known[key] = [
                (i, use) for i, formal in enumerate(function.input) for use in inner.uses.found.get(formal, ())
            ]
        for i, use in self.known[key]:
            if i < len(node.input) and node.input[i] in self.tensors:
                self.note(node.input[i], use)

    def give(self, node: onnx.NodeProto) -> None:
        """The outputs of a node that reads constants alone are constants."""
        if node.op_type in ("Constant", "ConstantOfShape") and node.output:
            self.hold(node.output[0], _held(node), self.axes_of(node))
            return
        roots: dict[str, bool] = {}
        if node.op_type not in _BLIND | _LOOK_UPS:  # a look-up is a use of its own
            for name in filter(None, node.input):
                for root, direct in self.tensors[name].roots.items():
                    roots[root] = roots.get(root, True) and direct and node.op_type in _REARRANGING
        first = self.tensors.get(node.input[0]) if node.input else None
        same = node.op_type in ("Unsqueeze", "Identity", "Reshape", "Cast", "CastLike", "Transpose", "Squeeze")
        for name in node.output:
            self.tensors[name] = _Tensor(roots, first.axes if same and first is not None else None)

    def axes_of(self, node: onnx.NodeProto) -> int | None:
        """The longer axes of what a node gives that makes a tensor. Errors in it are left to the import."""
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if "value_floats" in attributes:
            return int(len(attributes["value_floats"].floats) != 1)
        if node.op_type == "ConstantOfShape" and node.input and node.input[0] in self.extents:
            name = node.input[0]
            with contextlib.suppress(ForeplanError):
                extents = from_tensor(self.extents[name], name, None, name, Kind.CONSTANT).array
                if extents is not None:
                    return sum(int(extent) != 1 for extent in extents.reshape(-1))
        return None


def _held(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant."""
    if node.op_type != "Constant":
        return None
    return next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)


def reads(uses: Iterable[Use], slots: Mapping[str, Sequence[int]]) -> Iterator[Use]:
    """The uses that stand in certain inputs of certain ops."""
    return (use for use in uses if use.slot in slots.get(use.op, ()))
