"""What the constants of a model are used for, before anything is translated.

A constant that is computed from others, such as a transposed matrix, is used as they are: a use is told of the tensors
that stand in the file, and says whether these were merely rearranged on the way.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from foreplan.base.errors import ForeplanError
from foreplan.frontend.onnx.module.contents import uniform_value
from foreplan.frontend.onnx.places import REARRANGING, Near, proof
from foreplan.frontend.onnx.tensors import from_tensor
from foreplan.graph.value import Kind

if TYPE_CHECKING:
    import onnx

Functions = Mapping[tuple[str, str], "onnx.FunctionProto"]
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
_CONDITIONS = {("Where", 0), ("Gather", 1), ("GatherElements", 1), ("GatherND", 1), ("Compress", 1), ("Dropout", 1)}
_CONDITIONS |= {(op, slot) for op in ("Resize", "Upsample") for slot in (1, 2, 3)}
_LOOK_UPS = {"Gather", "GatherND", "GatherElements"}
# What biases, scales and shifts follow.
_COMPLETED = {"Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", "InstanceNormalization", "GroupNormalization"}
_COMPLETED |= {"LayerNormalization", "RMSNormalization", "LpNormalization", "Div", "BatchNormalization"}
# Op → axes of its weight one of which counts its columns or channels.
_COLUMNS = {"Conv": (0,), "ConvTranspose": (1,), "MatMul": (0, -1), "Gemm": (0, -1)}
# From sums of scores and a mask to their softmax.
_TO_SOFTMAX = REARRANGING | {"Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Clip", "Sum"}
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
        is_bias: whether it is added to what a contraction gives that has one column or channel.
        is_mask: whether it is added to scores of which a softmax is taken, or stands in the place of a mask.
        is_basis: whether sines and cosines are both taken of the product with it, as of random features.
        axes: how many axes of what is read are longer than 1; None: this is not known.
        place: why nobody learns what stands there, as `proof` says.
        way: what the tensor goes through before it meets data, if weights hardly do.
        partner: of a bias, the weight that the node reads.
        restored: whether the tensor was quantised, and is restored from integers before it meets data.
    """

    op: str
    slot: int
    direct: bool = True
    blind: bool = False
    completes: bool = False
    is_bias: bool = False
    is_mask: bool = False
    is_basis: bool = False
    axes: int | None = None
    place: str = ""
    way: str = ""
    partner: str = ""
    restored: bool = False


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


def find_uses(
    nodes: Sequence[onnx.NodeProto],
    initializers: Iterable[onnx.TensorProto],
    functions: Functions,
    path: Path | None = None,
) -> Uses:
    """What the constants of one scope are used for, bodies within its nodes included. Contents lie beside `path`."""
    walk = _Walk(functions, {}, path)
    for tensor in initializers:
        walk.hold(tensor.name, tensor)
        walk.uses.initializers.add(tensor.name)
    walk.run(nodes)
    return walk.uses


@dataclass(frozen=True)
class _Way:
    """How a constant comes from a tensor of the file: merely rearranged or not, through what weights hardly go, and
    whether it is restored from integers.
    """

    direct: bool = True
    through: str = ""
    restored: bool = False


@dataclass(frozen=True)
class _Tensor:
    """A constant.

    Attributes:
        roots: the tensors of the file that it comes from.
        axes: how many of its axes are longer than 1; None: this is not known.
        number: what stands everywhere in it; NaN where it is one number that is not known; None: several numbers.
        dims: its extents, if a tensor of the file tells them.
    """

    roots: Mapping[str, _Way]
    axes: int | None
    number: float | None = None
    dims: Sequence[int] = ()


_UNKNOWN = _Tensor({}, None)
_QUANTISING = {"QuantizeLinear", "DequantizeLinear"}
# Ops that weights hardly go through before they meet data, and what goes through them.
_WAYS = {"Sin": "its sine is taken, as of angles", "Cos": "its cosine is taken, as of angles"}
_WAYS |= dict.fromkeys(("ScatterElements", "ScatterND", "Scatter"), "scattered, as into a table of zeros")


class _Walk:
    """One pass over nodes in order; constants come before what reads them."""

    def __init__(self, functions: Functions, known: dict[object, list[tuple[int, Use]]], path: Path | None) -> None:
        self.functions, self.known, self.path = functions, known, path
        self.uses = Uses()
        self.tensors: dict[str, _Tensor] = {}
        self.extents: dict[str, onnx.TensorProto] = {}
        self.to_softmax: set[str] = set()  # tensors of which a softmax is taken, within `_FARTHEST` nodes
        self.to_waves: set[str] = set()  # those of which the sine and the cosine are
        self.makers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}

    def hold(self, name: str, tensor: onnx.TensorProto | None, like: _Tensor = _UNKNOWN) -> None:
        """A tensor that stands in the file; of one that a node or a call gives, what is known of it."""
        axes, number, dims = like.axes, like.number, like.dims
        self.uses.found.setdefault(name, [])
        self.uses.held[name] = tensor
        if tensor is not None:
            dims = tuple(tensor.dims)
            axes = sum(extent != 1 for extent in dims)
            if tensor.data_type == tensor.INT64 and tensor.data_location == tensor.DEFAULT:
                self.extents[name] = tensor
            number = uniform_value(tensor, self.path)
        number = math.nan if number is None and axes == 0 else number
        self.tensors[name] = _Tensor({name: _Way()}, axes, number, dims)

    def run(self, nodes: Sequence[onnx.NodeProto]) -> None:
        for node in nodes:
            self.makers.update((name, node) for name in node.output)
            for slot, name in enumerate(node.input):
                self.readers.setdefault(name, []).append((node, slot))
        softmax, sine, cosine = (
            {name for node in nodes if node.op_type == op for name in node.input} for op in ("Softmax", "Sin", "Cos")
        )
        self.mark(self.to_softmax, softmax, _TO_SOFTMAX)
        self.mark(self.to_waves, sine & cosine, REARRANGING | {"Mul"})
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
        for root, way in tensor.roots.items():
            found = replace(use, direct=use.direct and way.direct, axes=tensor.axes, way=use.way or way.through)
            self.uses.found[root].append(replace(found, restored=use.restored or way.restored))

    def use(self, node: onnx.NodeProto, slot: int) -> Use:
        op = node.op_type
        blind = op in _BLIND or (op, slot) in _CONDITIONS
        is_mask = _WITH_MASK.get(op) == slot
        if op in ("Add", "Sub", "Sum", "Where"):
            is_mask = not self.to_softmax.isdisjoint(node.output)
        others = [name for i, name in enumerate(node.input) if i != slot]
        completes = op in ("Add", "Mul") and any(map(self.is_completed, others))
        is_basis = op == "MatMul" and not self.to_waves.isdisjoint(node.output)
        tensor = self.tensors[node.input[slot]]
        place = proof(node, slot, tensor.number, tensor.axes == 0, Near(self.makers, self.readers))
        is_bias = op == "Add" and any(map(self.is_column, others))
        partner = self.root(node.input[1]) if op in _COLUMNS and slot == 2 else ""
        return Use(op, slot, True, blind, completes, is_bias, is_mask, is_basis, place=place, partner=partner)

    def root(self, name: str) -> str:
        """The tensor of the file that one comes from; empty: none, or several."""
        roots = list(self.tensors[name].roots) if name in self.tensors else []
        return roots[0] if len(roots) == 1 else ""

    def is_column(self, name: str) -> bool:
        """Whether a contraction with one column or channel made a tensor, which was merely rearranged since."""
        maker = Near(self.makers, {}).maker(name)
        if maker is None or maker.op_type not in _COLUMNS or len(maker.input) < 2:
            return False
        of = self.tensors.get(maker.input[1])
        extents = [] if of is None else [self.tensors[root].dims for root in of.roots]
        return any(len(dims) > 1 and any(dims[i] == 1 for i in _COLUMNS[maker.op_type]) for dims in extents)

    def is_completed(self, name: str) -> bool:
        """Whether data come from a contraction or a normalisation, merely rearranged, scaled or shifted since."""
        for _ in range(_FARTHEST):
            maker = self.makers.get(name)
            if maker is None:
                return False
            if maker.op_type in _COMPLETED:
                return True
            data = [each for each in maker.input if each and each not in self.tensors]
            if maker.op_type not in REARRANGING | {"Add", "Mul"} or not data:
                return False
            name = data[0]
        return False

    def call(self, node: onnx.NodeProto, function: onnx.FunctionProto) -> None:
        """The uses of what a function of the model's own is given, inside it."""
        given = [self.tensors.get(name) if name else None for name in node.input]
        told = tuple(each if each is None else (each.axes, repr(each.number), each.dims) for each in given)
        key = (function.domain, function.name, told)
        if key not in self.known:
            self.known[key] = []  # until it is found: a function that calls itself has none
            inner = _Walk(self.functions, self.known, self.path)
            for formal, each in zip(function.input, given):
                if each is not None:
                    inner.hold(formal, None, each)
            inner.run(function.node)
            self.known[key] = [
                (i, use) for i, formal in enumerate(function.input) for use in inner.uses.found.get(formal, ())
            ]
        for i, use in self.known[key]:
            if i < len(node.input) and node.input[i] in self.tensors:
                at = list(function.input).index(use.partner) if use.partner in function.input else len(node.input)
                partner = self.root(node.input[at]) if at < len(node.input) else ""
                self.note(node.input[i], replace(use, partner=partner))

    def give(self, node: onnx.NodeProto) -> None:
        """The outputs of a node that reads constants alone are constants."""
        if node.op_type in ("Constant", "ConstantOfShape") and node.output:
            self.hold(node.output[0], _held(node), _Tensor({}, self.axes_of(node), _filled(node)))
            return
        quantised = node.op_type in _QUANTISING
        moved = node.op_type in REARRANGING or quantised
        for slot, name in enumerate(node.input[1:] if quantised else (), 1):
            if name:  # a use of its own
                self.note(name, self.use(node, slot))
        roots: dict[str, _Way] = {}
        zeros = bool(node.input) and node.input[0] in self.tensors and self.tensors[node.input[0]].number == 0
        moved = moved or (zeros and node.op_type in _LOOK_UPS)
        if moved or node.op_type not in _BLIND | _LOOK_UPS:  # a look-up is a use of its own; zeros may be a state
            for name in filter(None, node.input[:1] if quantised else node.input):
                for root, way in self.tensors[name].roots.items():
                    before = roots.get(root, way)
                    through = before.through or way.through or self.through(node, name)
                    restored = before.restored or way.restored or node.op_type == "DequantizeLinear"
                    roots[root] = _Way(before.direct and way.direct and moved, through, restored)
        first = self.tensors.get(node.input[0]) if node.input else None
        same = quantised or node.op_type in (
            "Unsqueeze",
            "Identity",
            "Reshape",
            "Cast",
            "CastLike",
            "Transpose",
            "Squeeze",
        )
        axes = first.axes if same and first is not None else None
        number = first.number if moved and not quantised and first is not None and node.op_type != "Concat" else None
        for name in node.output:
            self.tensors[name] = _Tensor(roots, axes, number)

    def through(self, node: onnx.NodeProto, name: str) -> str:
        """What a constant goes through in a node that gives another one."""
        if node.op_type in ("MatMul", "Gemm") and self.tensors[name].number == 0:
            return "zeros in a product with constants, as a state before the first step is"
        return _WAYS.get(node.op_type, "")

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


def _filled(node: onnx.NodeProto) -> float | None:
    """The number that stands everywhere in what a node gives that makes a tensor of an attribute."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Constant":
        return attributes["value_float"].f if "value_float" in attributes else None
    return uniform_value(attributes["value"].t, None) if "value" in attributes else 0.0


def reads(uses: Iterable[Use], slots: Mapping[str, Sequence[int]]) -> Iterator[Use]:
    """The uses that stand in certain inputs of certain ops."""
    return (use for use in uses if use.slot in slots.get(use.op, ()))
