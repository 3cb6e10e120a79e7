"""The end of a forward graph, from some layer to the loss → parts of the batch, or of each image: local micro-batches.

Each part runs forward to its share of the loss. Differentiated, it runs back before the next part begins (`in_turn`):
its activations are then gone, and the gradients of weights are added up, in place. Only the activations of the layers
before exist for the whole batch. The price is that the weight gradients of the segment wait for the last part.
Reference: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
for micro-batches whose gradients are added up; here a part of the graph has them, and not the step.

Where the loss adds up what pixels give, bands of rows run so as well. Windows at the edge of a band read rows of the
next one, which both then compute. Reference: Alwani et al., "Fused-Layer CNN Accelerators", MICRO 2016, for such
pyramids of layers, in inference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from foreplan.base.units import format_bytes
from foreplan.graph import Builder, Graph, Kind, Node, Op, Value
from foreplan.ops.linear_cross_entropy import LOGITS_BYTES
from foreplan.ops.loss import CrossEntropy
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import MatMul
from foreplan.ops.pullback import depending
from foreplan.ops.reduce import Reduce, reduce
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite_ops
from foreplan.passes.tile.search import bytes_made, ranges, sums_of_parts, tile_up_to
from foreplan.passes.tile.tile import Tile, tiled

STEP = 1000  # the most nodes of the forward pass that all parts together have; a step has about three times as many
NEAR = 0.02  # more parts are of no use where they would leave less alive by so little
LEAST = 10  # parts are of use where 1 / LEAST of the bytes that the forward pass makes is then never whole
WIDEST = 1.25  # times the flops of the whole, which all bands of an image may take together


@dataclass(frozen=True)
class SplitSamples(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Let layers up to the loss run some samples at a time, forward and back, if many bytes are then never whole.

    Of all layers to begin with, it takes the one with which the least is alive at once: what is made before, a part of
    what is made behind, and the weight gradients that wait. There are as few parts as come near to that.

    Requires, ensures: as `samples_in_parts`.

    Attributes:
        most: parts: fewer where kernels over few samples take long.
    """

    most: int = STEP

    def _run(self, graph: Graph) -> Graph:
        samples = samples_of(graph)
        made = [0 if node.op.is_view else sum(x.type.nbytes for x in node.outputs) for node in graph.nodes]
        last = {x: at for at, node in enumerate(graph.nodes) for x in node.inputs if x.kind is Kind.PARAMETER}
        before, behind, waiting = 0, sum(made), sum(value.type.nbytes for value in last)  # the gradients of weights
        best, first, count = behind, 0, 1
        for begin, own in enumerate(made):
            most = min(samples, self.most, STEP // (len(made) - begin))
            counts = {parts for parts in range(1, most + 1) if samples % parts == 0 or parts.bit_count() == 1}
            enough = (1 + NEAR) * (before + waiting + behind // max(counts, default=1))
            parts = min((parts for parts in counts if before + waiting + behind / parts <= enough), default=1)
            alive = before + behind // parts + waiting
            if parts > 1 and alive < best:
                best, first, count = alive, begin, parts
            before, behind = before + own, behind - own
            waiting -= sum(value.type.nbytes for value in set(graph.nodes[begin].inputs) if last.get(value) == begin)
        found = samples_in_parts(graph, graph.nodes[first:], count) if count > 1 else None
        return graph if found is None or found[1] * LEAST < sum(made) else found[0]


@dataclass(frozen=True)
class SplitBands(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops")):
    """Let images run some rows at a time, forward and back, if many bytes are then never whole.

    Requires, ensures: as `samples_in_parts`.

    Attributes:
        count: of bands.
    """

    count: int

    def _run(self, graph: Graph) -> Graph:
        summed = _means_as_sums(graph)
        bands = (tile for tile in _to_loss(summed, summed.nodes, self.count) if tile.axis > 0)
        best = max(
            (tile for tile in bands if tile.widened() <= WIDEST),
            key=lambda tile: tile.saved_bytes(summed),
            default=None,
        )
        if best is None or best.saved_bytes(summed) * LEAST < bytes_made(graph):
            return graph
        return tiled(summed, best, _note(summed, best))


TO_LOSS = (SplitSamples, SplitBands)  # with these, each part is to run back before the next one


@dataclass(frozen=True)
class SplitLogits(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Make large logits, which only a sum of their cross-entropies reads, some rows at a time, each used before the
    next are made.

    Unlike `linear_cross_entropy`, products then add the weights' gradient to that of other parts, in place: there is
    one less of it. Smaller products may take longer.

    Requires, ensures: as `samples_in_parts`.
    """

    most: int = LOGITS_BYTES

    def _run(self, graph: Graph) -> Graph:
        names, before = [node.name for node in graph.nodes_of(CrossEntropy)], graph
        for name in names:
            head = _head(graph, next(node for node in graph.nodes if node.name == name))
            if head is None:
                continue
            (*inside, join), entropy = head
            shape, count = join.inputs[0].shape, -(-entropy.inputs[0].type.nbytes // self.most)
            axis = next((axis for axis in _reduced(join) if shape[axis] > 1), None)
            if count <= 1 or axis is None:
                continue
            for tile in _along(graph, inside, [join], axis, shape[axis], min(count, shape[axis])):
                graph = tiled(graph, tile, note="")
                names += [
                    node.name for node in graph.nodes if node.name.startswith(f"{name}/part")
                ]  # along another axis
        note = "logits are made some rows at a time, and used, forward and back, before the next are made"
        return graph if graph is before else dataclasses.replace(graph, notes=(*graph.notes, note))


def samples_in_parts(graph: Graph, nodes: Sequence[Node], count: int) -> tuple[Graph, int] | None:
    """A forward graph with what lies before its loss in parts of the batch, or of rows where there are more parts than
    samples; and the bytes of it that are never whole. None: nothing can run so.

    What cannot do with some samples, such as batch norm, and all that it needs, runs whole, before.

    Requires: a graph that is about to be differentiated; `in_turn` of `Differentiate` then lets each part run back
    before the next one. Ensures: the same results, up to the order of additions.

    Args:
        nodes: those that may run in parts.
        count: how many parts.
    """
    names = {node.name for node in nodes}
    graph = _means_as_sums(graph)
    found = _to_loss(graph, [node for node in graph.nodes if node.name in names], count)
    best = max(found, key=lambda tile: tile.saved_bytes(graph) / tile.widened(), default=None)
    return None if best is None else (tiled(graph, best, _note(graph, best)), best.saved_bytes(graph))


def samples_of(graph: Graph) -> int:
    """The batch: what the first extents of all inputs have in common."""
    return math.gcd(*(value.shape[0] for value in graph.inputs if value.init is None and value.shape))


def _to_loss(graph: Graph, inside: Collection[Node], count: int) -> Iterator[Tile]:
    """The ways to run nodes in parts, each along an axis of what the loss adds up: of samples, if there are enough."""
    samples, joins = samples_of(graph), _joins(graph)
    for axis in sorted(set.intersection(*(set(_reduced(node)) for node in joins))) if joins else ():
        extent = math.gcd(*(node.inputs[0].shape[axis] for node in joins))
        units = next((units for units in (samples, extent) if extent % units == 0 and units >= count), None)
        if units is not None:
            yield from _along(graph, inside, joins, axis, units, count)


def _along(
    graph: Graph, inside: Collection[Node], joins: Iterable[Node], axis: int, units: int, count: int
) -> Iterator[Tile]:
    """The way to run nodes in parts of whole units along one axis of what the joins read, if there is one."""
    targets = {}
    for node in joins:
        extent = node.inputs[0].shape[axis]
        targets[node] = sums_of_parts(node, axis, ranges(extent, count, extent // units))
    return tile_up_to(graph, {*inside, *targets}, targets, axis, sums=True)


def _note(graph: Graph, tile: Tile) -> str:
    first, more = next(iter(tile.members)).name, tile.widened() - 1
    where = f"along axis {tile.axis} of what the loss adds up" if tile.axis else "of the batch"
    again = f"; rows that two parts read are computed twice, which adds {more:.1%} of work" if more >= 0.0005 else ""
    return (
        f"{len(tile.members)} operations from {first!r} to the loss, and back, run in {tile.count} parts {where}: "
        f"{format_bytes(tile.saved_bytes(graph))} of their activations are never whole; the gradients of their weights "
        f"wait for the last{again}"
    )


def _means_as_sums(graph: Graph) -> Graph:
    """The graph with the means over samples that make the loss as sums, which are divided by how many there are."""
    joins = _joins(graph)

    def replace(b: Builder, node: Node[Reduce], inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        if node.op.how != "mean" or node not in joins:
            return None
        total = reduce(b, "sum", inputs[0], node.op.axes, node.op.keepdims, node.op.wide)
        return [elementwise(b, lambda x: x * (total.type.size / inputs[0].type.size), total, name=node.name)]

    return rewrite_ops(graph, replace, Reduce)


def _joins(graph: Graph) -> list[Node]:
    """The nodes that add up to the loss what samples give."""
    assert graph.loss is not None
    trained, data = depending(graph.parameters, graph.nodes), set(graph.inputs)
    for node in graph.nodes:
        if not data.isdisjoint(node.inputs):
            data.update(node.outputs)
    wanted, found = {graph.loss}, list[Node]()
    for node in reversed(graph.nodes):
        if wanted.isdisjoint(node.outputs):
            continue
        if not _reduced(node):
            wanted.update(value for value in node.inputs if value in trained)
        elif node.inputs[0] in trained and node.inputs[0] in data:
            found.insert(0, node)
    return found


def _reduced(node: Node) -> Sequence[int]:
    """The axes of a sum or a mean."""
    found = node.of(Reduce)
    return found.op.axes if found and found.op.how in ("sum", "mean") else ()


def _head(graph: Graph, entropy: Node) -> tuple[list[Node], Node] | None:
    """The nodes from the product that makes logits to the sum of their cross-entropies, if nobody else reads any."""
    found = [entropy]
    while not found[0].of(MatMul):
        before = graph.producer.get(found[0].inputs[0])
        if before is None or len(graph.readers[before.outputs[0]]) > 1 or before.outputs[0] in graph.returned:
            return None
        found.insert(0, before)
    while not _reduced(found[-1]):
        reader = graph.only_reader(found[-1].outputs[0], Op)
        if reader is None:
            return None
        found.append(reader)
    return found, entropy
