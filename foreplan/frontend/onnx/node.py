"""One ONNX node for its translation: its inputs, attributes and opset, and the builder it adds nodes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from foreplan.base.errors import ModelError, ShapeError, UnsupportedError, ValueNeededError
from foreplan.frontend.onnx.batch import Rebatch
from foreplan.frontend.onnx.tensors import Constant, filled, from_tensor
from foreplan.graph import Builder, DType, Kind, TensorType, Value
from foreplan.graph.types import Shape, broadcast_shapes
from foreplan.ops.expr import Arg, Const, Expr, Scalar, as_expr
from foreplan.ops.map import elementwise

if TYPE_CHECKING:
    import onnx

Operand = Value | Constant
Result = Operand | Sequence["Operand | None"]
Translation = Callable[["OnnxNode"], Result | None]  # None: by the function body that ONNX has for the op
TRANSLATIONS: dict[tuple[str, str], Translation] = {}
FEW = 64  # elements of an input that may well have the same values in every step
AnyTranslation = TypeVar("AnyTranslation", bound=Translation)


def binding(inputs: Sequence[Value]) -> str:
    """How to bind inputs by value, in Python and on the command line."""
    bind, flags = (f"{value.name!r}: …" for value in inputs), (f"--values {value.name}=…" for value in inputs)
    return f"values={{{', '.join(bind)}}} ({' '.join(flags)})"


def translates(*op_types: str, domain: str = "") -> Callable[[AnyTranslation], AnyTranslation]:
    """Make a function the translation of these ONNX ops: from a node to its output, or outputs in order."""

    def declare(translation: AnyTranslation) -> AnyTranslation:
        for op_type in op_types:
            if (domain, op_type) in TRANSLATIONS:
                raise ValueError(f"two functions translate {op_type}; remove one")
            TRANSLATIONS[domain, op_type] = translation
        return translation

    return declare


class Context(Protocol):
    """The common context of all translations of a model.

    Attributes:
        b: where nodes are added.
        batch: the change of batch size in progress, if any.
        path: the model's file, which external data lie beside; None for a model in memory.
        floats: name of a quantised tensor → what it was before.
    """

    floats: dict[str, Value]
    b: Builder
    batch: Rebatch | None
    path: Path | None

    def store(self, operand: Operand, taken: Value | None = None) -> Value:
        """An operand in the graph, as a node within a branch reads it that may be taken."""

    def sources(self, value: Value) -> Sequence[Value]:
        """The model's inputs that a value is computed from."""

    def random_stream(self) -> tuple[Value, int]:
        """The state that random ops read, and the number of a stream that no other op uses."""


class OnnxNode:
    """One node of the model, with its inputs found.

    Attributes:
        proto: the node as the file has it.
        op_type: its operator.
        opset: version of the operator's domain.
        inputs: of the node; None for an optional input that is left out.
        source: `model.onnx: node 'conv1' (Conv)`, which begins every message.
        b: where nodes are added.
        batch: the change of batch size in progress, if any.
        path: the model's file, if it is one.
        floats: name of a quantised tensor → what it was before.
        input_names, output_names: unique in the model.
        updates: stored value → its content for the next step, for ops that keep statistics.
        taken: whether the branch that the node is in is taken, where that depends on data.
        index: of the node in its graph.
        both: the condition of an If whose branches are both computed.
    """

    def __init__(
        self,
        proto: onnx.NodeProto,
        inputs: Sequence[Operand | None],
        opset: int,
        source: str,
        context: Context,
        input_names: Sequence[str] = (),
        output_names: Sequence[str] = (),
        taken: Value | None = None,
        index: int = 0,
    ) -> None:
        self.proto = proto
        self.op_type = proto.op_type
        self.opset = opset
        self.inputs = tuple(inputs)
        self.source = source
        self.b = context.b
        self.batch = context.batch
        self.path = context.path
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.updates: dict[Value, Value] = {}
        self.taken = taken
        self.index = index
        self.both: Value | None = None
        self.floats = context.floats
        self._context = context
        self._attributes = {attribute.name: attribute for attribute in proto.attribute}

    # Inputs.

    def has(self, index: int) -> bool:
        """Whether input `index` is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def operand(self, index: int) -> Operand:
        """Input `index` as it is.

        Raises:
            ModelError: it is missing.
        """
        operand = self.inputs[index] if index < len(self.inputs) else None
        if operand is None:
            raise ModelError(f"{self.source}: input {index} is missing, which the op needs")
        return operand

    def value(self, index: int) -> Value:
        """Input `index` in the graph; a constant is stored there."""
        return self.as_value(self.operand(index))

    def as_value(self, operand: Operand) -> Value:
        """An operand in the graph."""
        return self._context.store(operand, self.taken)

    def values(self) -> list[Value]:
        """All inputs that are given."""
        return [self.as_value(operand) for operand in self.inputs if operand is not None]

    def type(self, index: int) -> TensorType:
        """Element type and shape of input `index`."""
        return self.operand(index).type

    def shape(self, index: int) -> Shape:
        """Shape of input `index`."""
        return self.operand(index).type.shape

    def known(self, index: int) -> np.ndarray:
        """The content of input `index`, which must not depend on the model's inputs.

        Raises:
            ValueNeededError: it does, or is too large to be looked at during import.
        """
        operand = self.operand(index)
        if isinstance(operand, Constant) and operand.array is not None:
            return operand.array
        name = self.input_names[index] if index < len(self.input_names) else str(index)
        raise self.needs_value(
            operand, f"its input {name!r} must be known when the model is imported, since shapes are static, and"
        )

    def needs_value(self, operand: Operand, what: str) -> ValueNeededError:
        """The error for an operand that must be known at import and is not.

        Args:
            operand: a value of the graph, or a constant that is too large.
            what: begins the message, which goes on with "is computed from …".
        """
        whence, inputs = self.whence(operand)
        remedy = "export the model with it fixed"
        if inputs and all(value.type.size <= FEW for value in inputs):
            remedy = f"where the input is the same in every step, give it with {binding(inputs)}; else {remedy}"
        return ValueNeededError(f"{self.where}: {what} {whence}; {remedy}", tuple(value.name for value in inputs))

    def whence(self, operand: Operand) -> tuple[str, Sequence[Value]]:
        """Where an operand comes from: "is computed from …", and the model's inputs that it is computed from."""
        if isinstance(operand, Constant):
            return "is too large to be looked at", ()
        inputs = self._context.sources(operand)
        names = ", ".join(repr(value.name) for value in inputs)
        return f"is computed from data (input {names})" if inputs else "is computed from weights or at random", inputs

    def known_ints(self, index: int) -> list[int]:
        """The content of an integer input as a flat list."""
        array = self.known(index)
        if array.dtype.kind not in "iu":
            raise ModelError(f"{self.source}: input {index} must be integers, and is {array.dtype}")
        return [int(x) for x in array.reshape(-1)]

    def known_scalar(self, index: int) -> float | int | bool:
        """The single element of an input."""
        array = self.known(index)
        if array.size != 1:
            raise ModelError(f"{self.source}: input {index} must be one number, and has the shape {list(array.shape)}")
        return array.reshape(-1)[0].item()

    def literal(self, index: int) -> Const | None:
        """Input `index` as a literal, if it is one number that is not trained."""
        operand = self.operand(index)
        if isinstance(operand, Constant) and operand.is_foldable and operand.type.size == 1:
            assert operand.array is not None
            return Const(operand.array.reshape(-1)[0].item())
        return None

    def random_stream(self) -> tuple[Value, int]:
        """The model's random state, and the number of a stream of its own."""
        return self._context.random_stream()

    # Attributes.

    def _attribute(self, name: str, kind: str, default: Any) -> Any:
        import onnx

        found = self._attributes.get(name)
        if found is None:
            if default is ...:
                raise ModelError(f"{self.source}: the attribute {name!r} is missing")
            return default
        if found.type != getattr(onnx.AttributeProto, kind):
            raise ModelError(f"{self.source}: the attribute {name!r} must be {kind.lower()}")
        return onnx.helper.get_attribute_value(found)

    @property
    def attribute_names(self) -> set[str]:
        """Names of the attributes given."""
        return set(self._attributes)

    def has_attribute(self, name: str) -> bool:
        """Whether the attribute is given."""
        return name in self._attributes

    def integer(self, name: str, default: Any = ...) -> Any:
        """An integer attribute, or the default if it is not given; without a default it must be given."""
        return self._attribute(name, "INT", default)

    def number(self, name: str, default: Any = ...) -> Any:
        """A float attribute, as the shortest decimal number that rounds to the same float32."""
        value = self._attribute(name, "FLOAT", default)
        return float(str(np.float32(value))) if isinstance(value, float) and name in self._attributes else value

    def raw_number(self, name: str) -> float:
        """A float attribute, exactly as it is stored."""
        return self._attribute(name, "FLOAT", ...)

    def text(self, name: str, default: str = "") -> str:
        """A text attribute."""
        value = self._attribute(name, "STRING", default)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def integers(self, name: str, default: Any = None) -> Any:
        """A list of integers."""
        value = self._attribute(name, "INTS", default)
        return value if value is default else [int(x) for x in value]

    def numbers(self, name: str, default: Any = None) -> Any:
        """A list of floats."""
        return self._attribute(name, "FLOATS", default)

    def tensor(self, name: str, kind: Kind = Kind.CONSTANT) -> Constant | None:
        """A tensor attribute under the name of the first output, if it is given.

        Args:
            name: of the attribute.
            kind: what it becomes if it holds floats.
        """
        tensor = self._attribute(name, "TENSOR", None)
        if tensor is None:
            return None
        return from_tensor(tensor, self.output_names[0], self.path, self.source, kind)

    def strings(self, name: str) -> list[str]:
        """A list of texts, empty if it is not given."""
        return [text.decode("utf-8", "replace") for text in self._attribute(name, "STRINGS", [])]

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from 0.

        Raises:
            ShapeError: there is no such axis.
        """
        if not -rank <= axis < rank:
            raise ShapeError(f"{self.source}: there is no axis {axis} in a tensor with {rank} axes")
        return axis + rank if axis < 0 else axis

    def border(self, axis: int, rank: int) -> int:
        """A place before an axis, or behind the last one, counted from 0; negative places count from the end.

        Raises:
            ShapeError: there is no such place.
        """
        return rank if axis == rank else self.axis(axis, rank)

    def axes(self, axes: Sequence[int], rank: int) -> tuple[int, ...]:
        """Axes counted from 0, in the order given.

        Raises:
            ShapeError: one does not exist or is given twice.
        """
        found = tuple(self.axis(axis, rank) for axis in axes)
        if len(set(found)) != len(found):
            raise ShapeError(f"{self.source}: the axes {list(axes)} are not distinct")
        return found

    # Outputs.

    @property
    def output_count(self) -> int:
        """Number of outputs listed; trailing ones may be unnamed."""
        return len(self.proto.output)

    def wants(self, index: int) -> bool:
        """Whether output `index` has a name."""
        return index < len(self.proto.output) and bool(self.proto.output[index])

    def map(
        self, fn: Callable[..., Expr | Scalar], *indices: int, cast_to: DType | None = None, whole: Sequence[int] = ()
    ) -> Operand:
        """Apply a scalar function to inputs; single numbers that are not trained become literals.

        Args:
            fn: takes one expression for each index.
            indices: of the inputs; all inputs if none is given.
            cast_to: the element type of the result (the expression's own by default).
            whole: inputs that stay values even if they are single numbers.
        """
        chosen = list(indices) or [i for i in range(len(self.inputs)) if self.has(i)]
        literals = [None if i in whole else self.literal(i) for i in chosen]
        rank = max((len(self.shape(i)) for i, found in zip(chosen, literals) if found is None), default=-1)
        arguments: list[Expr] = []
        values: list[Value] = []
        for i, found in zip(chosen, literals):
            if found is not None and len(self.shape(i)) <= rank:
                arguments.append(found)
            else:
                arguments.append(Arg(len(values)))
                values.append(self.value(i))
        expr = as_expr(fn(*arguments))
        if isinstance(expr, Const):  # such as a product with zero
            shape = broadcast_shapes(*(self.shape(i) for i in chosen))
            dtype = cast_to or self.type(chosen[0]).dtype
            return filled(self.output_names[0], TensorType(dtype, shape), expr.value)
        return elementwise(self.b, expr, *values, dtype=cast_to)

    @property
    def where(self) -> str:
        """The node with its opset, which begins messages about what foreplan does not support."""
        return f"{self.source} with opset {self.opset}"

    def fail(self, reason: str) -> ModelError:
        """An error to raise: the model is wrong."""
        return ModelError(f"{self.source}: {reason}")

    def unsupported(self, reason: str) -> UnsupportedError:
        """An error to raise: the model is right, and foreplan cannot compile it."""
        return UnsupportedError(f"{self.where}: {reason}")

    def misshapen(self, reason: str) -> ShapeError:
        """An error to raise: shapes that do not fit."""
        return ShapeError(f"{self.source}: {reason}")
