"""The walk back over nodes that have been built: cotangents are summed as they arrive, and dropped when used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from foreplan.base.errors import ModelError
from foreplan.graph import Builder, Node, Op, Value
from foreplan.graph.op import Cotangents, Values
from foreplan.ops.join import Unslice, sum_of_unslices
from foreplan.ops.map import elementwise
from foreplan.ops.marks import StopGradient, StraightThrough


def depending(sources: Iterable[Value], nodes: Iterable[Node]) -> set[Value]:
    """The float values that `sources` reach through nodes, themselves among them: their cotangents may be needed."""
    reached = set(sources)
    for node in nodes:
        read = node.inputs[1:] if isinstance(node.op, StraightThrough) else node.inputs
        if not reached.isdisjoint(read) and not isinstance(node.op, StopGradient):
            reached.update(value for value in node.outputs if value.dtype.is_float)
    return reached


class Pullback:
    """The cotangents that a walk back has found so far.

    Attributes:
        b: where nodes are added; its `wanted` says which cotangents are needed.
    """

    def __init__(self, b: Builder) -> None:
        self.b = b
        self._cotangents: dict[Value, Value] = {}
        self._slices: dict[Value, list[Node]] = {}
        self._producer: dict[Value, Node] = {}
        self._nodes_seen = len(b.nodes)

    def through(self, node: Node) -> None:
        """Pull the cotangents of a node's outputs back to its inputs.

        Raises:
            ModelError: the op has no derivative, or one that does not fit.
        """
        cotangents = [self.take(value) for value in node.outputs]
        if all(cotangent is None for cotangent in cotangents):
            return
        flows = node.op.vjp(self.b, node.inputs, node.outputs, cotangents)
        for value, flow in zip(node.inputs, flows, strict=True):
            if flow is not None and flow.type != value.type:
                raise ModelError(f"the vjp of {node.op.name} gives {flow!r} as the cotangent of {value!r}")
        for value, flow in zip(node.inputs, flows):
            if flow is not None and self.b.wants(value):
                self.add(value, flow)

    def add(self, value: Value, flow: Value) -> None:
        """Sum at once: the summands die, and the sum can take their bytes. Cotangents of slices wait for `take`."""
        for node in self.b.nodes[self._nodes_seen :]:
            self._producer.update((output, node) for output in node.outputs)
        self._nodes_seen = len(self.b.nodes)
        source = self._producer.get(flow)
        if source is not None and isinstance(source.op, Unslice):
            self._slices.setdefault(value, []).append(source)
        else:
            self._sum(value, flow)

    def take(self, value: Value) -> Value | None:
        """The whole cotangent. Slices that took a value apart are joined again, without any zeros being added."""
        slices = self._slices.pop(value, [])
        joined = sum_of_unslices(self.b, slices) if len(slices) > 1 else None
        for flow in [node.outputs[0] for node in slices] if joined is None else [joined]:
            self._sum(value, flow)
        return self._cotangents.pop(value, None)

    def _sum(self, value: Value, flow: Value) -> None:
        if value in self._cotangents:
            flow = elementwise(self.b, lambda x, y: x + y, self._cotangents[value], flow, name="sum")
        self._cotangents[value] = flow


def pulled_back(
    b: Builder, nodes: Sequence[Node], ends: Iterable[tuple[Value, Value]], sources: Sequence[Value]
) -> list[Value | None]:
    """The cotangents of some values, given those of others that nodes compute from them.

    Args:
        b: where nodes are added.
        nodes: in order, all between.
        ends: values and their cotangents.
        sources: distinct floats.

    Returns:
        One a source; None if no end depends on it.

    Raises:
        ModelError: an op between has no derivative.
    """
    before, wanted = b.wanted, depending(sources, nodes)
    b.wanted = wanted
    try:
        walk = Pullback(b)
        for value, cotangent in ends:
            walk.add(value, cotangent)
        for node in reversed(nodes):
            if not wanted.isdisjoint(node.inputs):
                walk.through(node)
        return [walk.take(value) for value in sources]
    finally:
        b.wanted = before


def by_parts(op: Op, b: Builder, inputs: Values, cotangents: Cotangents) -> Cotangents:
    """For `vjp` of an op that has a decomposition: this is made once more, and pulled back.

    So the forward pass keeps the op's inputs alone, and nothing between its parts.

    Raises:
        ModelError: the op has no decomposition for these inputs, or a part has no derivative.
    """
    start, stored = len(b.nodes), len(b.stored)
    parts = op.decompose(b, inputs)
    if parts is None:
        return Op.vjp(op, b, inputs, (), cotangents)
    made = b.nodes[start:]
    sources = [x for x in dict.fromkeys(inputs) if x.dtype.is_float and b.wants(x)]
    ends = [(part, flow) for part, flow in zip(parts, cotangents, strict=True) if flow is not None]
    flows = dict(zip(sources, pulled_back(b, made, ends, sources)))
    back, made_by = b.nodes[start + len(made) :], {value: node for node in made for value in node.outputs}
    results = {flow for flow in flows.values() if flow is not None}
    b.nodes[start:] = _as_late(_read(back, results), made_by)
    read = results.union(value for node in b.nodes[start:] for value in node.inputs)
    b.stored[stored:] = [value for value in b.stored[stored:] if value in read]
    return [flows.pop(x, None) for x in inputs]


def _read(nodes: Sequence[Node], results: Iterable[Value]) -> list[Node]:
    """The nodes that results come from."""
    read, kept = set(results), []
    for node in reversed(nodes):
        if not read.isdisjoint(node.outputs):
            read.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _as_late(nodes: Iterable[Node], made_by: Mapping[Value, Node]) -> list[Node]:
    """Nodes with those that they need, of others, each right before its first reader: so few results wait."""
    found: dict[Node, None] = {}

    def add(node: Node) -> None:
        for value in node.inputs:
            needed = made_by.get(value)
            if needed is not None and needed not in found:
                add(needed)
        found[node] = None

    for node in nodes:
        if node not in found:
            add(node)
    return list(found)
