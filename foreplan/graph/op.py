"""What an op must state, in one place; a frozen dataclass an op, its fields the op's typed attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from foreplan.errors import ModelError, ShapeError, UnsupportedError
from foreplan.graph.ir import Value
from foreplan.graph.literal import check_arguments, literal_call
from foreplan.graph.types import DType, TensorType, Window, as_dtype

if TYPE_CHECKING:
    from foreplan.graph.build import Builder

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
        return False

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

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Build the nodes that pull output cotangents back to input cotangents.

        `cotangents` has an entry an output (None: nobody differentiates through it); the result has an entry an
        input (None: no gradient flows there). `b.wants(value)` says whether an input's cotangent is needed at all:
        nodes for unwanted ones are not built. The weight's gradient is built before the data's.

        Raises:
            UnsupportedError: the op has no derivative.
        """
        raise UnsupportedError(f"the op {self.name} has no derivative, and a gradient is asked through it")

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


_REGISTRY: dict[str, type[Op]] = {}
OpClass = TypeVar("OpClass", bound=type[Op])


def register(cls: OpClass) -> OpClass:
    """Make an op known by its name, for reading graphs and plans back from text."""
    if cls.name in _REGISTRY:
        raise ValueError(f"two ops are named {cls.name!r}")
    _REGISTRY[cls.name] = cls
    return cls


def registered_ops() -> dict[str, type[Op]]:
    """Every op by name, in the order of declaration."""
    return dict(_REGISTRY)


def op_named(name: str, **attributes: Any) -> Op:
    """The op of that name with these attributes.

    Raises:
        ModelError: no such op, or it has no such attribute, or one of another type.
    """
    if name not in _REGISTRY:
        raise ModelError(f"there is no op {name!r}")
    cls = _REGISTRY[name]
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(attributes) - known):
        raise ModelError(f"the op {name} has no attribute {unknown[0]!r}; it has {', '.join(sorted(known)) or 'none'}")
    try:
        check_arguments(cls, attributes)
        return cls(**attributes)
    except (TypeError, ValueError) as error:
        raise ModelError(f"the op {name} cannot be made with {attributes}: {error}") from None


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


def parse_op(text: str) -> Op:
    """The op written as `op_text` writes it; attributes are literals, nothing is evaluated.

    Raises:
        ModelError: the text is no op.
    """
    try:
        call = literal_call(text)
        if call.arguments:
            raise ValueError("its attributes have no names")
    except ValueError as error:
        raise ModelError(f"{text!r:.200} is not an op: {error}") from None
    return op_named(call.name, **call.keywords)


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
