"""Products of weights → products of parts of them, one part on each rank of a group, and sums over the group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from foreplan.errors import UsageError
from foreplan.graph import Array, Builder, Graph, Kind, Node, Value
from foreplan.graph.init import RandomSeed
from foreplan.graph.shard import Shard, Sharded
from foreplan.ops.map import elementwise
from foreplan.ops.random import Random
from foreplan.passes.tensor.parts import part_of, whole_of
from foreplan.passes.tensor.regions import ANYHOW, Found, Region, regions_of

_SEEDS = 0xD1B54A32D192ED03  # between the seeds of a group's ranks, odd; other than between those of groups


def split_products(graph: Graph, ranks: int, lies: Mapping[str, Shard | None] = ANYHOW) -> Graph:
    """The forward graph of one rank of a group that computes together.

    Each keeps a part of the weights that regions (see `regions_of`) read, and computes with it; the rest is as it was,
    and the same on all ranks of a group. Sums of what ranks have are `all_reduce`, whose derivative brings together
    cotangents in the same way, so that nothing else is exchanged. Without a loss, what is needed whole behind the last
    product, such as logits that are returned, is gathered.

    Args:
        lies: how weights are cut already, by name; what it does not name may be cut as products want it.

    Raises:
        UsageError: nothing can be computed in parts; says why.
    """
    found = regions_of(graph, ranks, lies)
    if not found.regions and lies:
        return graph
    if not found.regions:
        name, why = next(iter(found.whole.items()), ("", "there is no product with a weight"))
        where = f": {name!r} stays whole, since {why}" if name else f": {why}"
        raise UsageError(f"tensor={ranks}: nothing of {graph.name!r} can be computed in parts{where}")
    return _Rewrite(graph, ranks, found).run()


class _Rewrite:
    """One graph, with local types in its regions."""

    def __init__(self, graph: Graph, ranks: int, found: Found) -> None:
        self.graph, self.ranks, self.found = graph, ranks, found
        self.region_of = {node: region for region in found.regions for node in region.nodes}
        self.b = b = Builder(graph.name)
        b.inputs, b.notes = list(graph.inputs), list(graph.notes)
        b.reserve((*graph.inputs, *graph.stored), graph.nodes)
        self.now: dict[Value, Value] = {}  # what takes the place of a value, where it is cut or is another one
        self.own: dict[tuple[Value, Shard], Value] = {}
        self.joined = {value: region.parts[value] for region in found.regions for value in region.joined}
        self.wholes: dict[Value, Value] = {}  # of what is joined
        self.drawn: dict[Value, Value] = {}  # by random state, that from which a rank draws its own numbers

    def run(self) -> Graph:
        """The graph."""
        graph, b = self.graph, self.b
        b.stored = [self.stored(value) for value in graph.stored]
        for node in graph.nodes:
            b.source, b.scope = node.source, ""
            region = self.region_of.get(node)
            if region is None:
                inputs = tuple(self.whole(x) for x in node.inputs)
                b.append(Node(node.op, inputs, node.outputs, node.name, node.source), inferred=True)
            else:
                self.cut(node, region)
        now = self.now
        updates = {now.get(old, old): now.get(new, new) for old, new in graph.updates.items()}
        b.notes.append(_note(graph, self.found, self.ranks))
        outputs = {name: self.whole(value) for name, value in graph.outputs.items()}
        return b.finish(outputs, updates, None if graph.loss is None else now.get(graph.loss, graph.loss))

    def stored(self, value: Value) -> Value:
        """What a rank stores in the place of a value."""
        shard = next((region.parts[value] for region in self.found.regions if value in region.parts), None)
        if shard is not None:
            assert value.init is not None
            kept = replace(value, type=shard.of(value.type), init=Sharded(shard, value.type, value.init))
        elif isinstance(value.init, RandomSeed):
            kept = replace(value, init=RandomSeed(self.ranks))
        else:
            return value
        self.now[value] = kept
        return kept

    def cut(self, node: Node, region: Region) -> None:
        """A node of a region, on this rank's parts."""
        b, shards = self.b, region.nodes[node]
        inputs = tuple(self.input(x, region) for x in node.inputs)
        if isinstance(node.op, Random):
            inputs = tuple(self.state_of_rank(x) for x in node.inputs)
        if shards.close is None:
            outputs = tuple(
                y if shard is None else replace(y, type=shard.of(y.type))
                for y, shard in zip(node.outputs, shards.outputs)
            )
            self.now.update(zip(node.outputs, outputs))
            b.append(Node(shards.op, inputs, outputs, node.name, node.source))
            return
        b.scope = f"{node.name}/"
        self.now.update(zip(node.outputs, shards.close(b, self.ranks, node, inputs), strict=True))

    def input(self, value: Value, region: Region) -> Value:
        """What a node of a region reads in the place of a value."""
        shard = region.own.get(value)
        if shard is None:
            return self.now[value] if value in region.parts else self.whole(value)
        if (value, shard) not in self.own:
            self.own[value, shard] = self.part_of(value, shard)
        return self.own[value, shard]

    def part_of(self, value: Value, shard: Shard) -> Value:
        """This rank's part of what every rank has; of a constant, no other is kept."""
        if value.kind is Kind.CONSTANT and value.init is not None:
            kept = Sharded(shard, value.type, value.init)
            return self.b.store(f"{value.name}/part", shard.of(value.type), Kind.CONSTANT, kept)
        return part_of(self.b, value, shard)

    def whole(self, value: Value) -> Value:
        """What takes the place of a value where the whole of it is needed."""
        shard = self.joined.get(value)
        if shard is None:
            return self.now.get(value, value)
        if value not in self.wholes:
            b, scope = self.b, self.b.scope
            b.scope = f"{value.name}/"
            self.wholes[value] = whole_of(b, self.now[value], shard)
            b.scope = scope
        return self.wholes[value]

    def state_of_rank(self, state: Value) -> Value:
        """The random state from which each rank of a group draws its own numbers: that of all, with another seed."""
        if state not in self.drawn:
            b, scope = self.b, self.b.scope
            b.scope = ""
            seeds = np.array([[rank * _SEEDS % (1 << 64), 0] for rank in range(self.ranks)], np.uint64)
            whole = state.type.with_shape((seeds.size,))
            kept = Sharded(Shard(self.ranks, 0), whole, Array(seeds.reshape(-1)))
            shift = b.store(f"{state.name}/shift", state.type, Kind.CONSTANT, kept)
            common = self.now.get(state, state)
            self.drawn[state] = elementwise(b, lambda s, d: s + d, common, shift, name=f"{state.name}/of_rank")
            b.scope = scope
        return self.drawn[state]


def _note(graph: Graph, found: Found, ranks: int) -> str:
    """What is computed in parts, and what is not."""
    count, whole = found.products - len(found.whole), found.whole
    weights = [value for value in graph.stored if value.kind in (Kind.PARAMETER, Kind.FROZEN)]
    cut = sum(value.type.size for value in weights if any(value in region.parts for region in found.regions))
    share = f"{cut / sum(value.type.size for value in weights):.0%} of all weights"
    text = f"tensor={ranks}: {count} of {found.products} products are computed in parts, with {share}"
    if whole:
        name, why = next(iter(whole.items()))
        more = f", and {len(whole) - 1} more," if len(whole) > 1 else ""
        text += f"; every rank computes {name!r}{more} whole: {why}"
    return text
