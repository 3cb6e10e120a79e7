"""Forward graph → the forward pass of one stage, where stages hold the weights of a step that trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from foreplan.base.errors import UsageError
from foreplan.graph import Fill, Graph, GraphBuilder, Kind, Node, Value
from foreplan.graph.ir import live_nodes
from foreplan.ops.collective import Group
from foreplan.ops.map import Map
from foreplan.passes.base import Pass
from foreplan.passes.stages.layout import Layout
from foreplan.passes.stages.wire import Wire


def laid_out_by_weights(graph: Graph, held: Sequence[Collection[str]]) -> Layout:
    """A forward graph in stages that hold some of its weights each. A node is of the first stage, from those of what
    it reads on, that has the weights that it reads; what reads inputs alone is of its first reader. The last stage has
    the results. Where the first one has nothing to compute, it hands on an input, so that all stages are linked.

    Args:
        held: by stage, the names of what it stores.

    Raises:
        UsageError: no stage has what a node reads together; names the node.
    """
    owned = _owned(graph, held)
    if not owned[0]:
        graph = _with_an_input_handed_on(graph)
        owned = _owned(graph, held, graph.nodes[0])
    return Layout(graph, owned, (0,) * len(held))


def _owned(
    graph: Graph, held: Sequence[Collection[str]], handed_on: Node | None = None
) -> tuple[tuple[Node, ...], ...]:
    """By stage, its nodes.

    Args:
        handed_on: a node that the first stage keeps in any case.
    """
    whole = Layout(graph, (), ())
    weights = {value: frozenset([value.name]) for value in graph.stored if value.kind is not Kind.CONSTANT}
    line = list[Node]()
    for node in live_nodes(graph, graph.results):
        if node in whole.of_stored:
            weights.update((value, _read(node, weights)) for value in node.outputs)
        else:
            line.append(node)
    stage_of, free = _first_stages(graph, line, weights, held)
    for node in reversed(line):
        readers = [stage_of[reader] for value in node.outputs for reader in graph.readers[value] if reader in stage_of]
        if node in free and node is not handed_on and readers:
            stage_of[node] = min(readers)
    return tuple(tuple(node for node in line if stage_of[node] == stage) for stage in range(len(held)))


def _with_an_input_handed_on(graph: Graph) -> Graph:
    """The graph in which a copy of an input takes its place."""
    given = next(value for value in graph.inputs if graph.readers[value])
    b = GraphBuilder(base=graph)
    copy = b.apply(Map(("a0",)), given, name="handed_on")
    nodes = (replace(node, inputs=tuple(copy if x is given else x for x in node.inputs)) for node in graph.nodes)
    return replace(graph, nodes=(b.nodes[-1], *nodes))


def _read(node: Node, weights: Mapping[Value, frozenset[str]]) -> frozenset[str]:
    """The names of the weights that a node reads, itself or through what follows from weights alone."""
    return frozenset[str]().union(*(weights.get(value, ()) for value in node.inputs))


def _first_stages(
    graph: Graph, line: Sequence[Node], weights: Mapping[Value, frozenset[str]], held: Sequence[Collection[str]]
) -> tuple[dict[Node, int], set[Node]]:
    """The stage of each node of a line, and the nodes that no weight has anything to do with."""
    place, stage_of, free = dict[Value, int](), dict[Node, int](), set[Node]()
    results = set(graph.results)
    for node in line:
        read = _read(node, weights)
        first = max((place.get(value, 0) for value in node.inputs), default=0)
        if not results.isdisjoint(node.outputs):
            first = len(held) - 1
        elif not read and all(graph.producer.get(x) in free for x in node.inputs if x in place):
            free.add(node)
        stage = next((i for i in range(first, len(held)) if all(name in held[i] for name in read)), None)
        if stage is None:
            raise UsageError(
                f"node {node.name!r} reads {', '.join(sorted(read))}, which no stage from {first} on has together: "
                "compile both from one model, with the same train and freeze"
            )
        stage_of[node] = stage
        place.update((value, stage) for value in node.outputs)
    return stage_of, free


def stage_forward(layout: Layout, stage: int, ranks: int) -> Graph:
    """The forward pass of one stage: it receives what it reads of those before it, and sends what others read. The last
    stage has the results; another one keeps, as `sent`, that it has sent.

    Args:
        layout: of the forward graph.
        stage: which one, from 0 on.
        ranks: those of one stage. Each sends to the rank of the same number in another stage.
    """
    graph, last = layout.graph, layout.stages - 1
    b = GraphBuilder(graph.name)
    b.notes = list(graph.notes)
    b.stored = [value for value in graph.stored if value in layout.reads[stage]]
    b.reserve(b.stored, ())
    now = {value: b.input(value.name, value.type, value.init) for value in graph.inputs if value in layout.reads[stage]}
    wire = Wire(b, stage, Group(layout.stages, ranks))
    before = layout.crossing[stage - 1] if stage else ()
    begun = [wire.receive(value.type, stage - 1, number) for number, value in enumerate(before)]
    for value, each in zip(before, begun, strict=True):
        now[value] = wire.received(each, value.name)
    for node in layout.nodes[stage]:
        b.source = node.source
        b.repeat(node, [now.get(value, value) for value in node.inputs])
        now.update(zip(node.outputs, b.nodes[-1].outputs))
    b.source = ""
    if stage == last:
        return b.finish({name: now.get(value, value) for name, value in graph.outputs.items()})
    wire.finish([wire.send(now[value], stage + 1, number) for number, value in enumerate(layout.crossing[stage])])
    sent = wire.ends[-1]
    kept = b.store("sent", sent.type, Kind.ACCUMULATOR, Fill(0))
    return b.finish({}, {kept: sent})


@dataclass(frozen=True)
class CutIntoStages(Pass, requires=("forward",), ensures=("forward",)):
    """The forward pass of one stage, where stages hold the weights of a step that trains.

    Attributes:
        held: by stage, the names of what it stores.
        stage: which one this is, from 0 on.
        ranks: how many each stage has.

    Raises:
        UsageError: no stage has what a node reads together; names the node.
    """

    held: Sequence[Collection[str]]
    stage: int
    ranks: int

    def _run(self, graph: Graph) -> Graph:
        return stage_forward(laid_out_by_weights(graph, self.held), self.stage, self.ranks)
