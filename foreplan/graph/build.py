"""Building graphs: the one way to add nodes, with types inferred and names kept unique."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from foreplan.errors import ShapeError
from foreplan.graph.init import Initializer
from foreplan.graph.ir import Graph, Kind, Node, Value
from foreplan.graph.names import Names
from foreplan.graph.op import Op
from foreplan.graph.types import TensorType


class Builder:
    """Collects values and nodes and freezes them into a Graph.

    Attributes:
        kind: the kind of values that `node` makes (ACTIVATION, or GRADIENT while differentiating).
        scope: prefix of the names of new nodes, such as `layer1.0/`.
        source: written into new nodes, for error messages.
        wanted: while differentiating, the values whose cotangents are needed; None for all.
    """

    def __init__(self, name: str = "graph", base: Graph | None = None) -> None:
        self.name = name if base is None else base.name
        self.kind = Kind.ACTIVATION
        self.scope = ""
        self.source = ""
        self.inputs: list[Value] = list(base.inputs) if base else []
        self.stored: list[Value] = list(base.stored) if base else []
        self.nodes: list[Node] = list(base.nodes) if base else []
        self.notes: list[str] = list(base.notes) if base else []
        self._value_names = Names(value.name for value in base.values()) if base else Names()
        self._node_names = Names(node.name for node in base.nodes) if base else Names()
        self._inferred: set[Node] = set(base.nodes) if base else set()
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

    def finish(
        self,
        outputs: Mapping[str, Value],
        updates: Mapping[Value, Value] | None = None,
        loss: Value | None = None,
        gradients: Mapping[str, Value] | None = None,
    ) -> Graph:
        """Freeze and check what was built.

        Raises:
            ModelError: the graph breaks a rule of `verify_graph`.
        """
        from foreplan.graph.verify import verify_graph

        graph = Graph(
            name=self.name,
            inputs=tuple(self.inputs),
            stored=tuple(self.stored),
            nodes=tuple(self.nodes),
            outputs=dict(outputs),
            updates=dict(updates or {}),
            loss=loss,
            gradients=dict(gradients or {}),
            notes=tuple(self.notes),
        )
        verify_graph(graph, self._inferred)
        return graph
