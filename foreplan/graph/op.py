"""What an op must state, in one place, a frozen dataclass an op; nodes, which apply ops; and what adds nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph.axes import Axes, Part
from foreplan.graph.init import Initializer
from foreplan.graph.names import Names
from foreplan.graph.types import DType, TensorType, Window, as_dtype
from foreplan.graph.value import Kind, Value

Types = Sequence[TensorType]
Windows = Sequence[Window]
Arrays = Sequence[np.ndarray]
Values = Sequence[Value]
Cotangents = Sequence[Value | None]  # None where no gradient flows


@dataclass(frozen=True)
class Cost:
    """What one run of an op takes: floating-point operations (multiply-add = 2) and bytes moved (read + written)."""

    flops: int
    nbytes: int


@dataclass(frozen=True)
class View:
    """An output that is a window onto input 0: byte offset from its first element, and byte strides."""

    offset: int
    strides: tuple[int, ...]


class Training(Protocol):
    """What an op may ask for when it takes its training form.

    Attributes:
        ranks: of how many ranks' batches the statistics of a normalisation are.
    """

    ranks: int

    def update(self, stored: Value, new: Value) -> None:
        """Make `new` the content of a stored value for the next step (a running statistic)."""

    def next_content(self, stored: Value) -> Value:
        """What the nodes so far have made the content of a stored value for the next step; the value itself if none."""

    def random_state(self) -> Value:
        """The uint64[2] state (seed, step) that random ops read; changes from step to step."""

    def next_stream(self) -> int:
        """A number no other random op of the graph uses."""


@dataclass(frozen=True)
class Op:
    """The declaration of one op. Subclasses are frozen dataclasses and are made known by `@register`.

    An instance carries its attributes; two nodes with equal ops and equal inputs compute the same values.
    Types and arrays are passed as sequences in the op's own order of inputs and outputs.
    """

    name: ClassVar[str]
    is_view: ClassVar[bool] = False  # output 0 is a window onto input 0 and `view` gives it
    is_random: ClassVar[bool] = False  # reads a random state; the same state gives the same bits
    of_ranks: ClassVar[bool] = False  # what it gives depends on the rank, or on other ranks
    any_strides: ClassVar[bool] = False  # every input may have any strides: what `accepts_strides` says by default
    narrow: ClassVar[int] = 0  # so many first inputs are narrow in its form for narrow arithmetic; 0: it has none
    wide_at_end: ClassVar[bool] = False  # takes no narrow form where nothing but the loss reads what it gives

    @property
    def accumulates(self) -> int:
        """Not 0: a further input of this index, the last one and as output 0, is added to, in place if it is dead."""
        return 0

    @property
    def completes(self) -> bool:
        """Whether output 0 always has the bytes of input 0, where content arrives meanwhile: what waits for a copy."""
        return False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Output types from input types.

        Raises:
            ShapeError: the inputs do not fit the op or each other (the caller adds the node's name).
        """
        raise NotImplementedError

    @property
    def moves(self) -> bool:
        """Whether it only moves elements or reads them as others, so that it takes those of storage types too."""
        return self.is_view

    @property
    def keeps_precision(self) -> bool:
        """Whether its results are as narrow as what it reads, rounded once at most: it then never asks for a type."""
        return self.moves or self.is_view

    @property
    def wide_form(self) -> Op | None:
        """The op that leaves its sum of narrow elements in the wide type, as an attribute `wide` says; None: no such
        attribute.
        """
        if not any(field.name == "wide" for field in dataclasses.fields(self)):
            return None
        return dataclasses.replace(self, wide=True)  # type: ignore[call-arg]

    def wide_sum(self, inputs: Types) -> int | None:
        """The output that is wide in its wide form alone, for inputs of these types; None: there is none."""
        wide, given = self.wide_form, inputs[: self.accumulates or None]
        if wide is None:
            return None
        pairs = zip(self.infer(given), wide.infer(given), strict=True)
        return next((i for i, (type, wider) in enumerate(pairs) if type != wider), None)

    def result_types(self, inputs: Types) -> tuple[TensorType, ...]:
        """Output types of a node from input types: `infer`, for elements that the op can compute with.

        Raises:
            ShapeError: the inputs do not fit the op or each other, or hold elements that are only stored.
        """
        stored = next((x for x in inputs if x.dtype.is_storage), None)
        if stored is not None and not self.moves:
            raise ShapeError(
                f"{self.name} computes, and elements of {stored} are only stored: give foreplan.ops.storage.decoded(x)"
            )
        return self.infer(inputs)

    def check_count(self, inputs: Types, count: int) -> None:
        """For `infer`: raise a ShapeError unless there are `count` inputs."""
        if len(inputs) != count:
            raise ShapeError(f"{self.name} takes {count} inputs, and got {len(inputs)}")

    def indexing(self, inputs: Types, outputs: Types) -> Axes | None:
        """What each axis of each tensor walks, from which follow parts of the results; None: it only computes all."""
        return None

    def part(self, part: Part) -> Op | None:
        """For an op with `indexing` whose attributes tell of extents: what computes a part; None: nothing does."""
        return self

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Build the nodes that pull output cotangents back to input cotangents.

        `cotangents` has an entry an output (None: nobody differentiates through it); the result has an entry an
        input (None: no gradient flows there). `b.wants(value)` says whether an input's cotangent is needed at all:
        nodes for unwanted ones are not built. The weight's gradient is built before the data's.

        Raises:
            UnsupportedError: the op has no derivative.
        """
        raise UnsupportedError(f"the op {self.name} has no derivative, and a gradient is asked through it")

    def dependencies(self, inputs: Values) -> Values:
        """The inputs that derivatives take the results to depend on: all that no mark leaves out."""
        return inputs

    def reached(self, inputs: Values) -> Values:
        """The inputs that get a gradient if the results have one; a gradient that is zero for certain is none."""
        return [value for value in self.dependencies(inputs) if value.dtype.is_float]

    def view(self, input: TensorType, strides: tuple[int, ...]) -> View | None:
        """For `is_view` ops: the output as a window onto an input with these byte strides, or None where a dense
        copy of the input is needed first (a dense input always has one).
        """
        raise NotImplementedError

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """Pairs (output, input): the reference kernel gives the right result when that output takes exactly that
        input's bytes.
        """
        return ()

    def parts(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int, int], ...]:
        """Triples (output, input, byte): the reference kernel gives the right result when that input, dense, lies
        within that output from that byte on; it then copies nothing of it.
        """
        return ()

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Whether the reference kernel reads input `index` with these byte strides without copying it whole.
        Dense inputs are never asked about.
        """
        return self.any_strides

    def reads(self, index: int, window: Window) -> Window:
        """How the reference kernel takes input `index`: as it lies, or as a dense copy."""
        as_it_lies = window.is_dense or self.accepts_strides(index, window.type, window.strides)
        return window if as_it_lies else Window.dense(window.type)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Floating-point operations of one run (multiply-add = 2); an element-wise op counts its scalar operations."""
        raise NotImplementedError

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Work of one run; every input is read once and every output written once, if the op says nothing else."""
        return Cost(self.flops(inputs, outputs), sum(type.nbytes for type in (*inputs, *outputs)))

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Bytes of scratch memory that `compute` needs for its own duration."""
        return 0

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """The NumPy reference: write every output, using no other memory that grows with the tensors.

        Args:
            inputs: read-only by contract; dense, or strided where `accepts_strides` said yes.
            outputs: dense, to be written whole; may alias an input where `overwrites` or `parts` allow.
            workspace: uint8, `workspace()` bytes, 64-byte aligned, content undefined.
        """
        raise NotImplementedError

    def for_training(self, b: Builder, inputs: Values, training: Training) -> Values | None:
        """The outputs in the form that training wants (batch statistics, random masks, saved indices), one an output
        of the op; None where the op is the same in training and inference.
        """
        return None

    def valid_range(self, index: int, inputs: Types) -> tuple[int, ...] | None:
        """For an integer input that selects something: its lowest and highest valid value, then single values outside
        of these that are valid too. A session checks what the user gives against it before the step begins.
        """
        return None

    def decompose(self, b: Builder, inputs: Values) -> Values | None:
        """The same outputs by simpler ops, for targets without a kernel; None where the op is itself simple."""
        return None

    def __str__(self) -> str:
        return op_text(self)


Asked = TypeVar("Asked", bound=Op)  # the type of op that nodes are asked for
if TYPE_CHECKING:  # the default lets a plain `Node` stand for a node of any op
    from typing_extensions import TypeVar as WithDefault

    OpT = WithDefault("OpT", bound=Op, covariant=True, default=Op)
else:
    OpT = TypeVar("OpT", bound=Op, covariant=True)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Node(Generic[OpT]):
    """One application of an op: a `Node[Map]` of a map, a plain `Node` of any.

    Attributes:
        name: unique within the graph; an imported model's own node name where it has one.
        source: where a person finds it: `model.onnx: node 'conv1'` or `train.py:12`.
    """

    op: OpT
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name: str
    source: str = ""

    def of(self, *ops: type[Asked]) -> Node[Asked] | None:
        """The node itself, if it applies one of these ops; else None."""
        return self if isinstance(self.op, ops) else None  # type: ignore[return-value]

    def __repr__(self) -> str:
        left = ", ".join(map(repr, self.outputs))
        return f"{left} = {self.op}({', '.join('%' + value.name for value in self.inputs)})"


class Builder:
    """Collects values and nodes: the one way to add them, with types inferred and names kept unique.

    Attributes:
        kind: the kind of values that `node` makes (ACTIVATION, or GRADIENT while differentiating).
        scope: prefix of the names of new nodes, such as `layer1.0/`.
        source: written into new nodes, for error messages.
        wanted: while differentiating, the values whose cotangents are needed; None for all.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.kind = Kind.ACTIVATION
        self.scope = ""
        self.source = ""
        self.inputs: list[Value] = []
        self.stored: list[Value] = []
        self.nodes: list[Node] = []
        self.notes: list[str] = []
        self._value_names, self._node_names = Names(), Names()
        self._inferred: set[Node] = set()
        self.wanted: Collection[Value] | None = None

    def input(self, name: str, type: TensorType, default: Initializer | None = None) -> Value:
        """A value given anew each step; one with a default may be left out."""
        value = Value(self._value_names.claim(name), type, Kind.INPUT, default)
        self.inputs.append(value)
        return value

    def store(self, name: str, type: TensorType, kind: Kind, init: Initializer, why: str = "") -> Value:
        """A parameter, buffer, state or constant: keeps its bytes between steps. `why` is as `Value` has it."""
        value = Value(self._value_names.claim(name), type, kind, init, why)
        self.stored.append(value)
        return value

    def node(self, op: Op, *inputs: Value, name: str = "", outputs: Iterable[str] = ()) -> tuple[Value, ...]:
        """Apply an op and return its outputs.

        Args:
            op: what to apply.
            inputs: what it reads, in the op's order.
            name: of the node; made from the op's name if empty, made unique if taken.
            outputs: names of the values; made from the node's name if empty.

        Raises:
            ShapeError: the op cannot take these inputs; the message names the node.
        """
        node_name = self._node_names.free(self.scope + (name or op.name))
        try:
            types = op.result_types([value.type for value in inputs])
        except ShapeError as error:
            where = f" ({self.source})" if self.source else ""
            given = ", ".join(map(repr, inputs))
            raise ShapeError(f"node {node_name!r}{where}: {op.name} of {given}: {error}") from None
        wanted = list(outputs) or [node_name if len(types) == 1 else f"{node_name}.{i}" for i in range(len(types))]
        made = tuple(Value(self._value_names.claim(n), type, self.kind) for n, type in zip(wanted, types, strict=True))
        self._node_names.take((node_name,))
        new = Node(op, tuple(inputs), made, node_name, self.source)
        self._inferred.add(new)
        self.nodes.append(new)
        return made

    def apply(self, op: Op, *inputs: Value, name: str = "") -> Value:
        """Apply an op that has one output and return it."""
        (output,) = self.node(op, *inputs, name=name)
        return output

    def append(self, node: Node, *, inferred: bool = False, reserved: bool = False) -> None:
        """Take over a finished node (its values' names are already unique).

        Args:
            node: what to take over.
            inferred: whether its outputs are known to have the types that its op infers, so that `finish` need not ask.
            reserved: whether its names were given to `reserve` before.
        """
        if inferred:
            self._inferred.add(node)
        if not reserved:
            self.reserve((), (node,))
        self.nodes.append(node)

    def adopt(self, value: Value, name: str) -> Value:
        """A stored value of another graph, with all that is said of it, under a name like this one that is free."""
        adopted = dataclasses.replace(value, name=self._value_names.claim(name))
        self.stored.append(adopted)
        return adopted

    def repeat(self, node: Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
        """The outputs of another graph's node for other inputs of the same types; names begin with the scope."""
        outputs = tuple(dataclasses.replace(v, name=self._value_names.claim(self.scope + v.name)) for v in node.outputs)
        name = self._node_names.claim(self.scope + node.name)
        self.append(Node(node.op, tuple(inputs), outputs, name, node.source or self.source), inferred=True)
        return outputs

    def reserve(self, values: Iterable[Value], nodes: Iterable[Node]) -> None:
        """Keep these names, and the names of the nodes' outputs, for what `append` will bring."""
        nodes = tuple(nodes)
        self._node_names.take([node.name for node in nodes])
        self._value_names.take([value.name for value in values])
        self._value_names.take([value.name for node in nodes for value in node.outputs])

    @contextmanager
    def recorded(self) -> Iterator[list[Node]]:
        """While the body runs, its nodes go into a list of their own, and none into the graph."""
        before, nodes = self.nodes, list[Node]()
        self.nodes = nodes
        try:
            yield nodes
        finally:
            self.nodes = before

    def wants(self, value: Value) -> bool:
        """While differentiating: whether anybody reads the cotangent of `value`."""
        return self.wanted is None or value in self.wanted

    def note(self, text: str) -> None:
        """Tell the user what was changed."""
        self.notes.append(text)


def _attribute_text(value: Any) -> str:
    if isinstance(value, DType):
        return repr(value.name)
    return repr(value) if isinstance(value, int | float | str | tuple | bool | None) else repr(str(value))


def op_text(op: Op) -> str:
    """`name(attribute=value, …)` with the attributes that differ from their defaults; `parse_op` reads it."""
    shown = []
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            shown.append(f"{field.name}={_attribute_text(value)}")
    return f"{op.name}({', '.join(shown)})"


def only(cotangents: Cotangents) -> Value:
    """For `vjp` of an op with one output: its cotangent, which is there whenever `vjp` is asked."""
    (g,) = cotangents
    assert g is not None
    return g


def attributes(op: Op, of: type[Op]) -> dict[str, Any]:
    """An op's attributes that a class declares, for another op of that class: its gradient, say."""
    return {field.name: getattr(op, field.name) for field in dataclasses.fields(of)}


def coerce_dtype(op: Op, field: str) -> None:
    """For `__post_init__`: let an attribute be given as a name and hold a DType."""
    object.__setattr__(op, field, as_dtype(getattr(op, field)))
