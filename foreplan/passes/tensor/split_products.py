"""Products of weights → products of parts of them, one part on each rank of a group, and sums over the group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.graph import Array, Graph, Kind, Node, Value
from foreplan.graph.init import RandomSeed
from foreplan.graph.shard import Shard, Sharded
from foreplan.ops.map import elementwise
from foreplan.ops.random import Random
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import builder_for
from foreplan.passes.tensor.notes import note
from foreplan.passes.tensor.pieces import Total, gathered, own_part
from foreplan.passes.tensor.regions import ANYHOW, Found, Region, regions_of
from foreplan.passes.tensor.rules import Placement
from foreplan.passes.tensor.tokens import Tokens, tokens_of

_SEEDS = 0xD1B54A32D192ED03  # between the seeds of a group's ranks, odd; other than between those of groups


@dataclass(frozen=True)
class SplitProducts(Pass, requires=("forward", "plain ops"), ensures=("forward",)):
    """The forward graph of one rank of a group that computes together.

    Each keeps a part of the weights that regions (see `regions_of`) read, and computes with it. What lies between
    regions it computes for some of the tokens (see `tokens_of`); the rest is as it was, and the same on all ranks of a
    group. The derivatives of sums and of gathers bring together cotangents, so that nothing else is exchanged. Without
    a loss, what is needed whole behind the last product, such as logits that are returned, is gathered.

    Attributes:
        lies: how weights are cut already, by name; what it does not name may be cut as products want it.

    Raises:
        UsageError: nothing can be computed in parts; says why.
    """

    ranks: int
    lies: Mapping[str, Shard | None] = field(default_factory=lambda: ANYHOW)

    def _run(self, graph: Graph) -> Graph:
        found = regions_of(graph, self.ranks, self.lies)
        if not found.regions and self.lies:
            return graph
        if not found.regions:
            name, why = next(iter(found.whole.items()), ("", "there is no product with a weight"))
            where = f": {name!r} stays whole, since {why}" if name else f": {why}"
            raise UsageError(f"tensor={self.ranks}: nothing of {graph.name!r} can be computed in parts{where}")
        return _Rewrite(graph, self.ranks, found, tokens_of(graph, found.regions, self.ranks)).run()


class _Rewrite:
    """One graph, with local types in its regions."""

    def __init__(self, graph: Graph, ranks: int, found: Found, tokens: Tokens) -> None:
        self.graph, self.ranks, self.found, self.tokens = graph, ranks, found, tokens
        self.region_of = {node: region for region in (*found.regions, *tokens.regions) for node in region.shards}
        self.cut_by_tokens = {value: shard for region in tokens.regions for value, shard in region.parts.items()}
        self.b = builder_for(graph)
        self.now: dict[Value, Value] = {}  # what takes the place of a value, where it is cut or is another one
        self.own: dict[tuple[Value, Shard], Value] = {}
        joined = {value: region.parts[value] for region in found.regions for value in region.joined}
        self.parted = self.cut_by_tokens | joined  # values in parts of which something may need the whole
        self.wholes: dict[Value, Value] = {}  # what has been gathered of them
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
        b.scope = ""
        updates = {self.whole(old): self.whole(new) for old, new in graph.updates.items()}
        b.notes.append(note(graph, self.found, self.tokens, self.ranks))
        outputs = {name: self.whole(value) for name, value in graph.outputs.items()}
        return b.finish(outputs, updates, None if graph.loss is None else self.whole(graph.loss))

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
        b, shards = self.b, region.shards[node]
        inputs = tuple(self.input(x, shard, region) for x, shard in zip(node.inputs, shards.inputs, strict=True))
        if node.of(Random):
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
        total = Total(self.ranks, self.cut_by_tokens.get(node.outputs[0]))
        self.now.update(zip(node.outputs, shards.close(b, total, node, inputs), strict=True))

    def whole(self, value: Value) -> Value:
        """What takes the place of a value where the whole of it is needed."""
        now = self.now.get(value, value)
        if value not in self.parted:
            return now
        if value not in self.wholes:
            b, scope = self.b, self.b.scope
            b.scope = f"{value.name}/"
            self.wholes[value] = gathered(b, now, self.parted[value], value.type)
            b.scope = scope
        return self.wholes[value]

    def input(self, value: Value, shard: Placement, region: Region) -> Value:
        """What a node of a region reads in the place of a value that is cut so."""
        if shard is None:
            return self.whole(value)
        if value not in region.own:
            return self.now.get(value, value)
        if (value, shard) not in self.own:
            self.own[value, shard] = self.part_of(value, shard)
        return self.own[value, shard]

    def part_of(self, value: Value, shard: Shard) -> Value:
        """This rank's part of what every rank has; of a constant, no other is kept."""
        b = self.b
        if value.kind is Kind.CONSTANT and value.init is not None:
            kept = Sharded(shard, value.type, value.init)
            return b.store(f"{value.name}/part", shard.of(value.type), Kind.CONSTANT, kept)
        return own_part(b, self.whole(value), shard)

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
