"""Values, nodes and graphs: frozen, in SSA form, every shape static."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foreplan.errors import UsageError
from foreplan.graph.init import Initializer
from foreplan.graph.types import DType, Shape, TensorType

if TYPE_CHECKING:
    import networkx

    from foreplan.graph.op import Op


class Kind(StrEnum):
    """What a value is to the person who made the model."""

    INPUT = "input"  # given anew each step
    PARAMETER = "parameter"  # trained
    FROZEN = "frozen"  # a weight that training leaves as it is
    BUFFER = "buffer"  # kept by the model but not trained: running statistics
    STATE = "state"  # kept by the training step: momentum, step count, random seed
    ACCUMULATOR = "accumulator"  # a sum over the micro-batches of a step: zero before its first and after its last
    CONSTANT = "constant"  # never changes
    ACTIVATION = "activation"  # computed in the forward pass
    GRADIENT = "gradient"  # computed in the backward pass

    @property
    def is_stored(self) -> bool:
        """Whether a value of this kind keeps its bytes from one step to the next."""
        return self in _STORED

    @property
    def is_kept(self) -> bool:
        """Whether such a value is in every checkpoint: it is the model's own, or what training has come to."""
        return self in _KEPT

    @property
    def is_fixed(self) -> bool:
        """Whether no step changes a stored value of this kind."""
        return self in (Kind.CONSTANT, Kind.FROZEN)


_KEPT = frozenset({Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER, Kind.STATE})
_STORED = _KEPT | {Kind.ACCUMULATOR, Kind.CONSTANT}


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One tensor in SSA form, known by identity; `name` is unique within its graph.

    Attributes:
        init: the first content of a stored value; the default of an input that may be left out.
        why: for people, why a weight is trained, or is not; empty where the model itself says so.
    """

    name: str
    type: TensorType
    kind: Kind = Kind.ACTIVATION
    init: Initializer | None = None
    why: str = ""

    @property
    def shape(self) -> Shape:
        """Extent along each axis."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.type.dtype

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One application of an op.

    Attributes:
        name: unique within the graph; an imported model's own node name where it has one.
        source: where a person finds it: `model.onnx: node 'conv1'` or `train.py:12`.
    """

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name: str
    source: str = ""

    def __repr__(self) -> str:
        left = ", ".join(map(repr, self.outputs))
        return f"{left} = {self.op}({', '.join('%' + value.name for value in self.inputs)})"


@dataclass(frozen=True, eq=False)
class Graph:
    """A model or a whole training step. Nodes stand in an order in which they can run.

    Attributes:
        inputs: given anew each step.
        stored: parameters, buffers, state and constants, which keep their bytes between steps.
        outputs: what the user asked for, by name.
        updates: stored value → its content for the next step; reads in this graph see the old content.
        loss: the scalar that training minimises, returned by each step.
        gradients: parameter name → gradient, where gradients are returned rather than applied.
        notes: what import and passes changed, for people.
        origin: of an imported model, what it takes to write its file again: `foreplan.frontend.onnx.origin.Origin`; of
            one with adapters, the graph without them.
    """

    name: str
    inputs: tuple[Value, ...]
    stored: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: Mapping[str, Value]
    updates: Mapping[Value, Value] = field(default_factory=dict)
    loss: Value | None = None
    gradients: Mapping[str, Value] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    origin: object = None

    @property
    def parameters(self) -> tuple[Value, ...]:
        """The trained values among those stored."""
        return tuple(value for value in self.stored if value.kind is Kind.PARAMETER)

    @property
    def results(self) -> tuple[Value, ...]:
        """Every value that must exist when a step ends: loss, outputs, gradients and updates."""
        loss = () if self.loss is None else (self.loss,)
        return (*loss, *self.outputs.values(), *self.gradients.values(), *self.updates.values())

    @cached_property
    def returned(self) -> frozenset[Value]:
        """The results as a set, to ask whether a value is one of them."""
        return frozenset(self.results)

    @cached_property
    def producer(self) -> Mapping[Value, Node]:
        """The node that computes each computed value."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def readers(self) -> Mapping[Value, tuple[Node, ...]]:
        """The nodes that read each value, in order; a node that reads it twice is there once."""
        readers: dict[Value, list[Node]] = {value: [] for value in self.values()}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                readers[value].append(node)
        return {value: tuple(nodes) for value, nodes in readers.items()}

    def values(self) -> Iterator[Value]:
        """Every value: inputs, then stored, then node outputs in order."""
        yield from self.inputs
        yield from self.stored
        for node in self.nodes:
            yield from node.outputs

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all that is computed, in order: where `until` and `since` may cut."""
        return tuple(value.name for node in self.nodes for value in node.outputs)

    def until(self, *names: str) -> Graph:
        """The part of a model that computes some values: a backbone without its head.

        Args:
            names: of outputs, of any values, of nodes with one result, or of parts of the model that give one value to
                what follows (`layer4`). They become the names of the outputs.

        Returns:
            A graph without the nodes, weights and inputs that these values do not need.

        Raises:
            UsageError: a name means nothing, or several values; says what comes close.
        """
        from foreplan.graph.cut import until

        return until(self, names)

    def since(self, *names: str) -> Graph:
        """The part of a model that follows some values, which become its first inputs: a head without its backbone.

        Args:
            names: see `until`.

        Returns:
            A graph with the outputs that depend on these values; other inputs of the model remain where they are read.

        Raises:
            UsageError: a name means nothing, or several values, or no output depends on it.
        """
        from foreplan.graph.cut import since

        return since(self, names)

    def __call__(self, *inputs: Any, name: str = "", **named: Any) -> Any:
        """The model's outputs for tensors of a function that is being traced: a model is a layer of larger ones.

        Its weights keep their names, kinds and first contents; within a `nn.scope`, or with a name, their names begin
        with that. Called again under the same names, the same model uses the same weights.

        Args:
            inputs: tensors or arrays, in the order of the model's inputs.
            name: what the names of its weights and nodes begin with, as a layer's.
            named: the same by the names of inputs.

        Returns:
            The tensor, where the model has one output; else a dict of tensors by name.

        Raises:
            UsageError: no input is a traced tensor; or inputs are left out, or given twice.
            ShapeError: an input has another type than the model's.
            TraceError: the graph has a loss, or another parameter has the name of one of its weights.
        """
        for each in (*inputs, *named.values()):
            if hasattr(each, "__call_graph__"):
                return each.__call_graph__(self, inputs, named, name)
        raise UsageError(
            f"graph {self.name!r} is called in a function that foreplan.trace runs, with its tensors; to run it on "
            "arrays, compile(graph).bind().step({...})"
        )

    def as_text(self) -> str:
        """The graph as text that people read and `parse_graph` reads back."""
        from foreplan.graph.text import print_graph

        return print_graph(self)

    def to_networkx(self) -> networkx.DiGraph:
        """A DiGraph whose nodes are Values and Nodes and whose edges follow the data.

        Raises:
            UsageError: networkx is not installed.
        """
        from foreplan.graph.walk import to_networkx

        return to_networkx(self)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.nodes)} nodes, {len(self.stored)} stored values>"
