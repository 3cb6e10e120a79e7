"""What lies between products in parts: each rank computes it for some of the tokens.

Sums of products are what such a region begins with: a rank gets its tokens' part of a sum, and what follows computes
with these, up to what needs all tokens and gathers them (Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022: sequence parallelism). A sum over ranks sends as much as its two halves, this part of
it and the gathering, so nothing more is sent, and of norms, dropout and residual sums a rank keeps its tokens' alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreplan.graph import Graph, Node, Value
from foreplan.graph.shard import Shard
from foreplan.ops.index import Gather
from foreplan.ops.matmul import MatMul
from foreplan.passes.tensor.regions import Region, Search
from foreplan.passes.tensor.rules import Known, StaysWhole, check, shards_of


@dataclass(frozen=True)
class Tokens:
    """What ranks compute for some of the tokens.

    Attributes:
        regions: disjoint.
        sums: how many sums of products begin them.
        whole: by the name of each other sum, why every rank gets all of it.
    """

    regions: tuple[Region, ...]
    sums: int
    whole: dict[str, str]


def tokens_of(graph: Graph, regions: Sequence[Region], ranks: int) -> Tokens:
    """What lies between regions of products in parts, cut along an axis of their sums other than the last: along the
    first one that divides and lets no more be gathered than what is summed.
    """
    between = _Between(graph, regions)
    found, begun, whole = list[Region](), set[Value](), dict[str, str]()
    for value, node in between.sums.items():
        if value in begun:
            continue
        region, why = between.from_sum(value, ranks)
        if region is None:
            whole[node.name] = why
            continue
        found.append(region)
        begun.update(region.parts.keys() & between.sums.keys())
        between.taken.update(region.shards)
    whole = {name: why for name, why in whole.items() if name not in {between.sums[value].name for value in begun}}
    return Tokens(tuple(found), len(begun), whole)


class _Between:
    """Looks for regions of tokens.

    Attributes:
        sums: what products, and reads of tables, in other regions sum up over ranks; the node of each.
        taken: nodes that are in a region.
    """

    def __init__(self, graph: Graph, regions: Sequence[Region]) -> None:
        self.search = search = Search(graph)
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        products = {
            node
            for region in regions
            for node, shards in region.shards.items()
            if shards.close is not None and node.of(MatMul, Gather)
        }
        self.sums = {value: node for value, node in search.producer.items() if node in products}
        self.taken = {node for region in regions for node in region.shards}

    def from_sum(self, value: Value, ranks: int) -> tuple[Region | None, str]:
        """The region that begins with a sum, and others; None, and why there is none."""
        why, fits = f"{value.type} has no axis of tokens", False
        for axis in range(value.type.rank - 1):
            shard = Shard(ranks, axis)
            try:
                check(shard, value.type)
            except StaysWhole as error:
                why = why if fits else str(error)
                continue
            region, fits = self.grown(value, shard), True
            self.end_where_least_is_gathered(region)
            if not self.pays(region):
                self.begin_where_least_is_gathered(region)
            if self.pays(region):
                return region, ""
            why = "more would have to be gathered than what is summed"
        return None, why

    def pays(self, region: Region) -> bool:
        """Whether no more is gathered than what is summed."""
        return _nbytes(self.gathered(region)) <= _nbytes(region.parts.keys() & self.sums.keys())

    def grown(self, start: Value, shard: Shard) -> Region:
        """All that can compute with parts, as far as it hangs together with a sum."""
        region, coming = Region(parts={start: shard}), [start]
        while coming:
            value = coming.pop()
            shard, producer = region.parts[value], self.search.producer[value]
            if value not in self.sums and producer not in region.shards:
                coming += self.join(region, Known(producer, producer.outputs.index(value), True, shard))
                if producer not in region.shards:
                    region.own[value] = region.parts.pop(value)
                    continue
            for node, index in self.search.readers.get(value, ()):
                coming += self.join(region, Known(node, index, False, shard))
        return region

    def join(self, region: Region, known: Known) -> list[Value]:
        """Take a node in, if it can compute with parts; what else is cut then."""
        node = known.node
        if node in self.taken or node in region.shards:
            return []
        try:
            shards = shards_of(known)
        except StaysWhole:
            return []
        tensors = [*zip(node.inputs, shards.inputs), *zip(node.outputs, shards.outputs)]
        cut = dict[Value, Shard]()
        for value, placement in tensors:
            now = region.parts.get(value, region.own.get(value))
            if now not in (None, placement):
                return []
            if placement is not None and now is None and cut.setdefault(value, placement) != placement:
                return []
        region.shards[node] = shards
        made = {value: shard for value, shard in cut.items() if self.is_made_between(value)}
        region.parts |= made
        region.own |= {value: shard for value, shard in cut.items() if value not in made}
        return list(made)

    def is_made_between(self, value: Value) -> bool:
        """Whether nodes between regions may make parts of a value; of others, each rank takes its part."""
        producer = self.search.producer.get(value)
        return value in self.sums or not (producer is None or producer in self.taken or value in self.search.given)

    def gathered(self, region: Region) -> list[Value]:
        """The values in parts of which something needs all tokens."""

        def is_whole(node: Node, index: int) -> bool:
            return node not in region.shards or region.shards[node].inputs[index] is None

        readers, returned = self.search.readers, self.search.returned
        return [
            value
            for value in region.parts
            if value in returned or any(is_whole(node, index) for node, index in readers.get(value, ()))
        ]

    def end_where_least_is_gathered(self, region: Region) -> None:
        """Leave out what comes last where more is gathered of it than of what it reads, such as logits, or queries,
        keys and values that are whole: what it reads is gathered instead.
        """
        gathered = set(self.gathered(region))
        for node in sorted(region.shards, key=self.position.__getitem__, reverse=True):
            last = self.followed(region, node)
            made = {y for each in last for y in each.outputs if y in region.parts}
            read = {x for each in last for x in each.inputs if x in region.parts} - made
            if _nbytes(read - gathered) < _nbytes(made & gathered):
                for each in last:
                    del region.shards[each]
                for y in made:
                    del region.parts[y]
                gathered = gathered - made | read

    def begin_where_least_is_gathered(self, region: Region) -> None:
        """Leave out what depends on no sum yet and is gathered, with all before it: every rank computes it whole."""
        before = dict[Node, set[Node]]()  # nodes that depend on no sum, and all that each depends on
        for node in sorted(region.shards, key=self.position.__getitem__):
            made_by = [self.search.producer[x] for x in node.inputs if x in region.parts]
            if all(producer in before for producer in made_by):
                before[node] = {node}.union(*(before[producer] for producer in made_by))
        for value in self.gathered(region):
            for node in before.get(self.search.producer[value], ()):
                if region.shards.pop(node, None) is not None:
                    region.own |= {y: region.parts.pop(y) for y in node.outputs if y in region.parts}

    def followed(self, region: Region, start: Node) -> set[Node]:
        """A node of a region, and all of it that follows; nothing, if that computes with further sums."""
        found, coming = set[Node](), [start]
        while coming:
            node = coming.pop()
            if node in found:
                continue
            if any(x in self.sums for x in node.inputs) or node not in region.shards:
                return set()
            found.add(node)
            readers = (reader for y in node.outputs for reader, _ in self.search.readers.get(y, ()))
            coming += [reader for reader in readers if reader in region.shards]
        return found


def _nbytes(values: Iterable[Value]) -> int:
    return sum(value.type.nbytes for value in values)
