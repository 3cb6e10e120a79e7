"""What of a forward graph ranks compute in parts: from products whose columns they share to products that sum up.

The first product of such a region has its weight in columns, so each rank makes some of the outputs; what follows
computes with these, up to products that have their weights in rows, whose results are summed over the ranks (Shoeybi
et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019). In a transformer
a region is the attention of a block, by heads, or its two or three dense layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from foreplan.graph import Graph, Kind, Node, Value
from foreplan.graph.shard import Shard
from foreplan.ops.index import Gather
from foreplan.ops.matmul import MatMul
from foreplan.passes.tensor.rules import Known, Shards, StaysWhole, check, shards_of

ANYHOW: Mapping[str, Shard | None] = MappingProxyType({})
BLOCKS = (1, 3, 2)  # of a weight's columns: one projection, or queries, keys and values in one, or gate and up


@dataclass
class Region:
    """What is computed in parts.

    Attributes:
        parts: how values are cut, stored ones among them.
        shards: what computes with parts, and how the tensors of each node are cut.
        own: values that every rank has whole, of which it takes its part there.
        whole: values that nodes of the region read, or make, whole.
        joined: parts of which others need the whole, so that it is gathered.
    """

    parts: dict[Value, Shard] = field(default_factory=dict)
    shards: dict[Node, Shards] = field(default_factory=dict)
    own: dict[Value, Shard] = field(default_factory=dict)
    whole: set[Value] = field(default_factory=set)
    joined: set[Value] = field(default_factory=set)

    @property
    def is_closed(self) -> bool:
        """Whether whole values are made of the parts."""
        return bool(self.joined) or any(each.close is not None for each in self.shards.values())


@dataclass(frozen=True)
class Found:
    """What can be computed in parts, and what cannot.

    Attributes:
        regions: disjoint.
        products: how many products of weights there are.
        whole: by the name of each whose weight every rank has whole, why.
    """

    regions: tuple[Region, ...]
    products: int
    whole: dict[str, str]


def regions_of(graph: Graph, ranks: int, lies: Mapping[str, Shard | None] = ANYHOW) -> Found:
    """The regions of a forward graph, in its order.

    Args:
        lies: how weights are cut already, by name; what it does not name may be cut in any way.
    """
    search = Search(graph, lies)
    found, whole, taken = list[Region](), dict[str, str](), set[Node]()
    products = [node for node in graph.nodes if search.is_product(node)]
    for node in graph.nodes:
        if node in taken or not (search.is_product(node) or search.is_large_table(node)):
            continue
        region, why = search.from_node(node, ranks)
        if region is None or not taken.isdisjoint(region.shards):
            if node.of(MatMul):
                whole[node.name] = why
            continue
        found.append(region)
        taken.update(region.shards)
    whole = {name: why for name, why in whole.items() if name not in {node.name for node in taken}}
    return Found(tuple(found), len(products), whole)


class Search:
    """Looks for regions of one graph.

    Attributes:
        producer, readers: of values, each reader with the index of its input.
        given: what follows from inputs and constants alone, such as a mask. What is random is drawn in parts.
        returned: results and updates.
    """

    def __init__(self, graph: Graph, lies: Mapping[str, Shard | None] = ANYHOW) -> None:
        self.lies = lies
        self.producer = {value: node for node in graph.nodes for value in node.outputs}
        self.readers: dict[Value, list[tuple[Node, int]]] = {}
        for node in graph.nodes:
            for index, value in enumerate(node.inputs):
                self.readers.setdefault(value, []).append((node, index))
        self.returned = {*graph.results, *graph.updates}
        stored = [value for value in graph.stored if value.kind not in (Kind.PARAMETER, Kind.FROZEN)]
        self.given = {*graph.inputs, *stored}
        for node in graph.nodes:
            if not node.op.is_random and self.given.issuperset(node.inputs):
                self.given.update(node.outputs)
        self.leading: set[Value] = set()  # what products depend on; without a loss, other parts may be joined
        for node in reversed(graph.nodes):
            if self.is_product(node) or not self.leading.isdisjoint(node.outputs):
                self.leading.update(node.inputs)
        self.joins = graph.loss is None

    def is_product(self, node: Node) -> bool:
        """Whether it is a product whose right factor is a weight."""
        return isinstance(node.op, MatMul) and self.is_weight(node.inputs[1])

    def is_large_table(self, node: Node) -> bool:
        """Whether it reads rows of a weight that has more elements than they, which are summed up."""
        table = node.of(Gather)
        if table is None or table.op.axis or not self.is_weight(node.inputs[0]):
            return False
        return node.inputs[0].type.size > node.outputs[0].type.size

    def is_weight(self, value: Value) -> bool:
        """Whether a value is a weight, or made of one alone, such as its narrow copy."""
        while value in self.producer and len(self.producer[value].inputs) == 1:
            value = self.producer[value].inputs[0]
        return value.kind in (Kind.PARAMETER, Kind.FROZEN)

    def from_node(self, node: Node, ranks: int) -> tuple[Region | None, str]:
        """The region that begins with the columns of a product, or the rows of a table; None, and why there is none."""
        is_product = isinstance(node.op, MatMul)
        start = node.outputs[0] if is_product else node.inputs[0]
        axis, reasons = start.type.rank - 1 if is_product else 0, []
        ways = [(blocks, False) for blocks in (BLOCKS if is_product else (1,))]
        for blocks, joins in [*ways, (1, True)] if self.joins else ways:
            region = Region()
            try:
                self.grow(region, start, Shard(ranks, axis, blocks), joins)
            except StaysWhole as error:
                reasons.append(str(error))
                continue
            if region.is_closed:
                return region, ""
            reasons.append("nothing follows that needs parts alone")
        return None, reasons[0]

    def grow(self, region: Region, start: Value, shard: Shard, joins: bool) -> None:
        """Cut a value, and with it all that must be.

        Args:
            joins: whether parts behind the last product may be joined where the whole is needed.

        Raises:
            StaysWhole: something cannot be.
        """
        coming = [(start, shard)]
        while coming:
            value, shard = coming.pop()
            if region.parts.get(value, region.own.get(value)) == shard:
                continue
            if value in region.parts or value in region.own or value in region.whole:
                raise StaysWhole(f"{value.name!r} would be cut in two ways")
            may_join = joins and value not in self.leading
            if value in self.returned:
                if not may_join:
                    raise StaysWhole(f"{value.name!r} is a result of the step")
                region.joined.add(value)
            if self.lies.get(value.name, shard) != shard:
                raise StaysWhole(f"{value.name!r} is stored in another way")
            check(shard, value.type)
            if value in self.given:
                region.own[value] = shard
                continue
            region.parts[value] = shard
            ends = [(node, index, False) for node, index in self.readers.get(value, ())]
            if value in self.producer:
                node = self.producer[value]
                ends.append((node, node.outputs.index(value), True))
            for node, index, made in ends:
                try:
                    coming += self.visit(region, Known(node, index, made, shard))
                except StaysWhole:
                    if made or region.shards.get(node) is not None or not may_join:
                        raise
                    region.joined.add(value)

    def visit(self, region: Region, known: Known) -> Sequence[tuple[Value, Shard]]:
        """Let a node compute with parts; what else is cut then.

        Raises:
            StaysWhole: it cannot.
        """
        node, shards = known.node, shards_of(known)
        if region.shards.get(node, shards) != shards:
            raise StaysWhole(f"{node.name!r} would be cut in two ways")
        placed = (*zip(node.inputs, shards.inputs), *zip(node.outputs, shards.outputs))
        whole = [value for value, cut in placed if cut is None]
        for value in whole:
            if value in region.parts:
                raise StaysWhole(f"{node.name!r} needs the whole of {value.name!r}")
        region.shards[node] = shards
        region.whole.update(whole)
        return [(value, cut) for value, cut in placed if cut is not None]
