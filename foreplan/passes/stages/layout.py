"""A forward graph as stages: which nodes each runs, what crosses from one to the next, and which weights each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from foreplan.base.errors import ModelError, UsageError
from foreplan.base.units import format_bytes, format_seconds
from foreplan.graph import Fill, Graph, GraphBuilder, Kind, Node, Value
from foreplan.graph.ir import live_nodes
from foreplan.ops.pullback import Pullback, depending
from foreplan.passes.autodiff import differentiate, pull_back
from foreplan.passes.stages.cuts import best_cuts

Price = Callable[[Node], int]  # the predicted time of a node, in nanoseconds


@dataclass(frozen=True)
class Layout:
    """A forward graph in stages.

    Nodes that read stored values alone, such as narrow copies of weights, are of every stage that reads them; all
    others that the loss needs stand in one line, which is cut.

    Attributes:
        graph: the forward graph of one micro-batch, with its loss.
        owned: by stage, its nodes of the line, and what follows from them for running statistics, in order.
        nanoseconds: by stage, predicted: forward and backward of one micro-batch.
    """

    graph: Graph
    owned: tuple[tuple[Node, ...], ...]
    nanoseconds: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Their number."""
        return len(self.owned)

    @cached_property
    def of_stored(self) -> frozenset[Node]:
        """The nodes that read stored values alone."""
        return _of_stored(self.graph.nodes)

    @cached_property
    def wanted(self) -> frozenset[Value]:
        """The values whose cotangents parameters need."""
        return frozenset(depending(self.graph.parameters, self.graph.nodes))

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """By stage, all that it runs forward, in order; what reads stored values alone before its first reader."""
        return tuple(self._nodes_of(stage) for stage in range(self.stages))

    @cached_property
    def reads(self) -> tuple[frozenset[Value], ...]:
        """By stage, the values that its nodes read."""
        return tuple(frozenset(value for node in nodes for value in node.inputs) for nodes in self.nodes)

    @cached_property
    def crossing(self) -> tuple[tuple[Value, ...], ...]:
        """By cut, the values that are made before it and read behind it. Each stage hands on what a later one reads."""
        last = {value: stage for stage, values in enumerate(self.reads) for value in values}
        found: list[tuple[Value, ...]] = []
        before: list[Value] = []
        for stage in range(self.stages - 1):
            before += [value for node in self.owned[stage] for value in node.outputs]
            before = [value for value in before if last.get(value, -1) > stage]
            found.append(tuple(before))
        return tuple(found)

    @cached_property
    def returning(self) -> tuple[tuple[Value, ...], ...]:
        """By cut, those of `crossing` whose cotangents come back."""
        return tuple(tuple(value for value in values if value in self.wanted) for values in self.crossing)

    def holders(self, stored: Value) -> tuple[int, ...]:
        """The stages that have a stored value."""
        return tuple(stage for stage, values in enumerate(self.reads) if stored in values)

    @cached_property
    def tied(self) -> tuple[Value, ...]:
        """The parameters that several stages have, such as a tied embedding."""
        return tuple(value for value in self.graph.parameters if len(self.holders(value)) > 1)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that have gradients."""
        return frozenset(differentiate(self.graph).gradients)

    def forward(self, stage: int) -> Graph:
        """What a stage runs forward, with what is stored there."""
        stored = tuple(value for value in self.graph.stored if value in self.reads[stage])
        return replace(self.graph, nodes=self.nodes[stage], stored=stored)

    @cached_property
    def training(self) -> tuple[int, ...]:
        """The stages that have parameters."""
        parameters = set(self.graph.parameters)
        return tuple(stage for stage, values in enumerate(self.reads) if not parameters.isdisjoint(values))

    def _nodes_of(self, stage: int) -> tuple[Node, ...]:
        graph, own = self.graph, self.owned[stage]
        found: dict[Node, None] = {}
        reads: set[Value] = set()

        def add(node: Node) -> None:
            """Put a node behind those of stored values that it needs."""
            if node not in found:
                for value in node.inputs:
                    maker = graph.producer.get(value)
                    if maker is not None and maker in self.of_stored:
                        add(maker)
                found[node] = None
                reads.update(node.inputs)

        for node in own:
            add(node)
        left = {
            old: graph.producer[new] for old, new in graph.updates.items() if graph.producer.get(new) in self.of_stored
        }
        while due := [old for old in left if old in reads or (stage == 0 and not self._is_read(old, left[old]))]:
            for old in due:
                add(left.pop(old))
        return tuple(found)

    def _is_read(self, stored: Value, update: Node) -> bool:
        """Whether something else than its update reads a stored value."""
        return any(reader is not update for reader in self.graph.readers[stored])

    def as_text(self) -> str:
        """A line a stage: its nodes, the bytes of its weights, what it sends to the next one, and its time."""
        lines = []
        for stage, own in enumerate(self.owned):
            weights = [x for x in self.graph.stored if x in self.reads[stage] and x.kind is Kind.PARAMETER]
            sent = "" if stage == self.stages - 1 else f", sends {_listed(self.crossing[stage])}"
            numbers = sum(value.type.size for value in weights)
            lines.append(
                f"stage {stage}: {len(own):,} nodes from {own[0].name} to {own[-1].name}, {numbers:,} parameters, "
                f"{format_seconds(self.nanoseconds[stage] / 1e9)}{sent}"
            )
        return "\n".join(lines) + "\n"


def laid_out(graph: Graph, stages: int, price: Price) -> Layout:
    """A forward graph cut into stages, as `best_cuts` says: by the predicted time of each node, forward and backward,
    and by the bytes of what crosses, with the cotangents that come back.

    Requires: `graph.loss` is set; ops are in training form.

    Args:
        price: of a node, forward or backward.

    Raises:
        UsageError: the model has fewer nodes than stages, or the running statistics of a layer are read in two.
        ModelError: the loss depends on no parameter.
        UnsupportedError: an op on the way has no derivative; names the node.
    """
    assert graph.loss is not None
    whole = Layout(graph, (), ())
    if graph.loss not in whole.wanted:
        raise ModelError(
            f"graph {graph.name!r}: the loss {graph.loss!r} depends on no parameter; nothing can be trained"
        )
    line = [node for node in live_nodes(graph, (graph.loss,)) if node not in whole.of_stored]
    if len(line) < stages:
        raise UsageError(
            f"stages={stages}: the model {graph.name!r} has {len(line)} operations, and each stage needs one: take "
            f"{len(line)} stages or fewer"
        )
    of_node = _times(graph, whole.wanted, price)
    times = [of_node[node] for node in line]
    starts = (0, *best_cuts(times, _traffic(line, whole.wanted), stages), len(line))
    stage_of = {node: stage for stage in range(stages) for node in line[starts[stage] : starts[stage + 1]]}
    place: dict[Value, int] = {}
    owned: list[list[Node]] = [[] for _ in range(stages)]
    for node in live_nodes(graph, graph.results):
        if node in whole.of_stored:
            continue
        stage = stage_of.get(node, max((place[value] for value in node.inputs if value in place), default=0))
        place.update((value, stage) for value in node.outputs)
        owned[stage].append(node)
    spans = tuple(sum(times[first:end]) for first, end in pairwise(starts))
    found = Layout(graph, tuple(map(tuple, owned)), spans)
    _check_updates(found, place)
    return found


def _of_stored(nodes: Iterable[Node]) -> frozenset[Node]:
    found: set[Node] = set()
    made: set[Value] = set()
    for node in nodes:
        if all(value.kind.is_stored or value in made for value in node.inputs):
            found.add(node)
            made.update(node.outputs)
    return frozenset(found)


def _times(graph: Graph, wanted: frozenset[Value], price: Price) -> dict[Node, int]:
    """The time of each node, with that of the nodes that its derivative takes."""
    assert graph.loss is not None
    b = GraphBuilder(base=graph)
    b.kind, b.wanted = Kind.GRADIENT, wanted
    walk = Pullback(b)
    walk.add(graph.loss, b.store("one", graph.loss.type, Kind.CONSTANT, Fill(1.0)))
    found = {}
    for node in reversed(graph.nodes):
        first = len(b.nodes)
        pull_back(walk, node)
        found[node] = price(node) + sum(map(price, b.nodes[first:]))
    return found


def _traffic(line: Sequence[Node], wanted: frozenset[Value]) -> list[int]:
    """Bytes that cross before each node: of values, and of the cotangents that come back for them."""
    last = {value: at for at, node in enumerate(line) for value in node.inputs}
    change = [0] * (len(line) + 1)
    for at, node in enumerate(line):
        for value in node.outputs:
            if (end := last.get(value, at)) > at:
                nbytes = value.type.nbytes * (2 if value in wanted else 1)
                change[at + 1] += nbytes
                change[end + 1] -= nbytes
    traffic, now = [], 0
    for each in change[: len(line)]:
        now += each
        traffic.append(now)
    return traffic


def _check_updates(layout: Layout, place: dict[Value, int]) -> None:
    """Check that what changes within a step is of one stage, but for what each can follow by itself."""
    for old, new in layout.graph.updates.items():
        if new not in place:
            continue
        if others := [stage for stage in layout.holders(old) if stage != place[new]]:
            raise UsageError(
                f"stages={layout.stages}: {old.name!r} is changed in stage {place[new]} and read in stage {others[0]}: "
                "take another number of stages"
            )


def _listed(values: Sequence[Value]) -> str:
    return f"{format_bytes(sum(value.type.nbytes for value in values))} in {', '.join(value.name for value in values)}"
