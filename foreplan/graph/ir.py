"""Graphs: frozen, in SSA form; and their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import UsageError
from foreplan.base.patterns import close_names, scopes_of
from foreplan.graph.digraph import to_networkx
from foreplan.graph.op import Asked, Node
from foreplan.graph.printed import printed
from foreplan.graph.value import Kind, Value

if TYPE_CHECKING:
    import networkx


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

    def nodes_of(self, *ops: type[Asked]) -> tuple[Node[Asked], ...]:
        """The nodes that apply one of these ops, in order."""
        return tuple(node for node in self.nodes if isinstance(node.op, ops))  # type: ignore[misc]

    def made_by(self, value: Value, *ops: type[Asked]) -> Node[Asked] | None:
        """The node that computes a value, if it applies one of these ops; None: another does, or nothing."""
        node = self.producer.get(value)
        return None if node is None else node.of(*ops)

    def only_reader(self, value: Value, *ops: type[Asked]) -> Node[Asked] | None:
        """The node that alone reads a value, which is no result, if it applies one of these ops; else None."""
        readers = self.readers[value]
        return readers[0].of(*ops) if len(readers) == 1 and value not in self.returned else None

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
        found = named_values(self, names)
        return _part(self, self.nodes, self.inputs, found)

    def since(self, *names: str) -> Graph:
        """The part of a model that follows some values, which become its first inputs: a head without its backbone.

        Args:
            names: see `until`.

        Returns:
            A graph with the outputs that depend on these values; other inputs of the model remain where they are read.

        Raises:
            UsageError: a name means nothing, or several values, or no output depends on it.
        """
        cut = list(named_values(self, names).values())
        given = {value: dataclasses.replace(value, kind=Kind.INPUT, init=None) for value in cut}
        for value in cut:
            if value in self.producer and len(self.producer[value].outputs) > 1:
                made = self.producer[value].name
                raise UsageError(
                    f"{value.name!r} is one of several results of {made!r}: name a value that follows from it"
                )
        nodes = [node for node in self.nodes if given.keys().isdisjoint(node.outputs)]
        reached: set[Value] = set(cut)
        for node in nodes:
            if not reached.isdisjoint(node.inputs):
                reached.update(node.outputs)
        moved = [dataclasses.replace(n, inputs=tuple(given.get(v, v) for v in n.inputs)) for n in nodes]
        outputs = {name: given.get(value, value) for name, value in self.outputs.items() if value in reached}
        inputs = (*given.values(), *(value for value in self.inputs if value not in given))
        part = _part(self, moved, inputs, outputs)
        for name, value in zip(names, given.values()):
            if value not in part.inputs:
                raise UsageError(f"no output of graph {self.name!r} depends on {name!r}, or on it and the others named")
        return part

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
        return printed(
            self.name, (*self.inputs, *self.stored), self.nodes, self.loss,
            {"output": self.outputs, "gradient": self.gradients}, self.updates, self.notes,
        )  # fmt: skip

    def to_networkx(self) -> networkx.DiGraph:
        """A DiGraph whose nodes are Values and Nodes and whose edges follow the data.

        Raises:
            UsageError: networkx is not installed.
        """
        return to_networkx(self.name, self.values(), self.nodes)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.nodes)} nodes, {len(self.stored)} stored values>"


def live_nodes(graph: Graph, results: Iterable[Value]) -> tuple[Node, ...]:
    """The nodes that the results depend on, in order."""
    needed = set(results)
    kept = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return tuple(reversed(kept))


def named_values(graph: Graph, names: Sequence[str]) -> dict[str, Value]:
    """The value that each name means: an output of the graph, any value, the one result of a node, or the one value
    that a part of the model gives to what follows.

    Raises:
        UsageError: there are no names, or a name means no value, or several.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"a model is cut at names of values, such as {', '.join(map(repr, graph.outputs))}")
    values = {value.name: value for value in graph.values()}
    nodes = {node.name: node for node in graph.nodes}
    found = {}
    for name in names:
        value = graph.outputs.get(name) or values.get(name)
        found[name] = _only_result(graph, name, nodes) if value is None else value
    return found


def _only_result(graph: Graph, name: str, nodes: Mapping[str, Node]) -> Value:
    """What a node, or a part of the model, gives to the rest."""
    inside = [nodes[name]] if name in nodes else [n for n in graph.nodes if name.lstrip("/") in scopes_of(n.name)]
    results = set(graph.outputs.values())
    own = set(inside)
    given = [
        value
        for node in inside
        for value in node.outputs
        if value in results or any(reader not in own for reader in graph.readers[value])
    ]
    if len(given) == 1:
        return given[0]
    if given:
        listed = ", ".join(repr(value.name) for value in given[:5])
        raise UsageError(
            f"graph {graph.name!r}: {name!r} gives {len(given)} values to what follows, {listed}: name one"
        )
    names = [*graph.outputs, *(v.name for v in graph.values()), *nodes]
    raise UsageError(f"graph {graph.name!r} has no value {name!r}; there are {close_names(name, names)}")


def _part(graph: Graph, nodes: Sequence[Node], inputs: Iterable[Value], outputs: Mapping[str, Value]) -> Graph:
    """The outputs and what they need of these nodes, inputs and stored values, with the updates of a random state."""
    whole = dataclasses.replace(graph, nodes=tuple(nodes), outputs=dict(outputs), loss=None, gradients={})
    read = {value for node in live_nodes(whole, outputs.values()) for value in node.inputs} | set(outputs.values())
    updates = {old: new for old, new in graph.updates.items() if old in read and graph.loss is None}
    live = live_nodes(whole, (*outputs.values(), *updates.values()))
    read.update(value for node in live for value in node.inputs)
    return dataclasses.replace(
        whole,
        inputs=tuple(value for value in inputs if value in read),
        stored=tuple(value for value in graph.stored if value in read),
        nodes=live,
        updates=updates,
    )
