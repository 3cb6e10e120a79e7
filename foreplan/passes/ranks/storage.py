"""How a forward pass has its weights: in parts of its own, or where another step has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from foreplan.base.errors import UsageError
from foreplan.graph import Graph, Kind, Node, TensorType, Value
from foreplan.graph.flat import Flat
from foreplan.graph.shard import Shard, Sharded
from foreplan.ops.collective import Group
from foreplan.passes.base import Pass
from foreplan.passes.ranks.inference import gathering, in_parts
from foreplan.passes.ranks.layout import Bucket, narrow_copies
from foreplan.passes.ranks.setting import ALONE, Ranks
from foreplan.passes.rewrite import builder_for
from foreplan.passes.tensor.pieces import gathered, own_part

Held = Mapping[str, Shard | None]  # how weights are cut, by name
_OWN = (Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER)  # of a model, as against a step


@dataclass(frozen=True)
class Storage:
    """What the ranks of a forward pass hold of its weights.

    Attributes:
        ranks: the setting.
        like: what another step stores of the model, in its order; empty: there is none to go by.
        step: the name of that step, for people.
        held: by stage, how the weights are cut that it has, by name; empty: the step is whole.
    """

    ranks: Ranks
    like: tuple[Value, ...] = ()
    step: str = ""
    held: tuple[Held, ...] = ()

    @cached_property
    def lies(self) -> Mapping[str, Shard | None]:
        """How the other step's weights are cut, by name; of all its stages."""
        own = {name: _cut(each) for name, each in self._theirs.items()}
        return {name: cut for stage in self.held for name, cut in stage.items()} | own

    @cached_property
    def _theirs(self) -> Mapping[str, Value]:
        """What the other step stores, by name: of a row each tensor."""
        return {each.name: each for value in self.like for each in _tensors(value)}

    def shared(self, graph: Graph) -> Graph:
        """The graph that stores what the other step does.

        Raises:
            UsageError: that step stores another model.
        """
        self._check(graph)
        graph = _Stored(graph, self._theirs).run()
        own = {value.name: value for value in graph.stored if value.kind in _OWN}
        rows = [value for value in self.like if isinstance(value.init, Flat)]
        reads, copies = {*graph.results, *(x for node in graph.nodes for x in node.inputs)}, narrow_copies(graph)
        read = {name: value for name, value in own.items() if value in reads}
        graph = gathering(graph, [_bucket(row, read, copies) for row in rows])
        rest = [value for value in graph.stored if value.kind not in _OWN]
        return replace(graph, stored=(*self.like, *rest))

    def _check(self, graph: Graph) -> None:
        for value in graph.stored:
            if value.kind not in _OWN:
                continue
            own, there = _whole(value), self._theirs.get(value.name)
            found = None if there is None else _whole(there)
            if found != own:
                raise UsageError(
                    f"share: {value.name!r} is {own} here and {found or 'missing'} in the step of {self.step!r}: "
                    "compile both from one model, what measures it from `evaluation` with that step's train and freeze"
                )


WHOLE = Storage(ALONE)


@dataclass(frozen=True)
class LayOutWeights(Pass, requires=("forward",), ensures=("forward",)):
    """The forward graph that reads weights where they are.

    Attributes:
        storage: what ranks hold of them.

    Raises:
        UsageError: the other step stores another model.
    """

    storage: Storage

    def _run(self, graph: Graph) -> Graph:
        if self.storage.like:
            return self.storage.shared(graph)
        return in_parts(graph, self.storage.ranks) if self.storage.ranks.shard == "parameters" else graph


def _tensors(value: Value) -> list[Value]:
    """A stored value or, of a row, its tensors."""
    if not isinstance(value.init, Flat):
        return [value]
    return [Value(each.name, each.type, value.kind, each.init, each.why) for each in value.init.members]


def _cut(value: Value) -> Shard | None:
    return value.init.shard if isinstance(value.init, Sharded) else None


def _whole(value: Value) -> TensorType:
    """The type of the whole of a stored tensor."""
    return value.init.type if isinstance(value.init, Sharded) else value.type


def _bucket(row: Value, read: Mapping[str, Value], copies: Mapping[Value, Value]) -> Bucket:
    """A row of another step, with those of its tensors that are read.

    Args:
        read: weights, by name.
        copies: their narrow copies, of those that are read through these alone.
    """
    lies = row.init
    assert isinstance(lies, Flat)
    members = tuple(each for each in lies.members if each.name in read)
    weights = tuple(read[each.name] for each in members)
    narrow = tuple(copies[value] for value in weights if value in copies)
    alike = len(narrow) == len(weights) and len({value.dtype for value in narrow}) == 1
    size = row.type.size * lies.ranks
    return Bucket(weights, members, size, row, Group(lies.ranks, lies.stride), narrow if alike else ())


class _Stored:
    """One graph that reads other stored values of the same names: whole ones, or parts."""

    def __init__(self, graph: Graph, theirs: Mapping[str, Value]) -> None:
        self.graph = graph
        self.other = {value: theirs[value.name] for value in graph.stored if value.kind in _OWN}
        self.now: dict[Value, Value] = {}
        self.b = builder_for(graph)
        self.b.stored = [self.other.get(value, value) for value in graph.stored]

    def run(self) -> Graph:
        """The graph."""
        for node in self.graph.nodes:
            inputs = tuple(map(self.value, node.inputs))
            self.b.append(Node(node.op, inputs, node.outputs, node.name, node.source), inferred=True)
        outputs = {name: self.value(value) for name, value in self.graph.outputs.items()}
        updates = {self.value(old): self.value(new) for old, new in self.graph.updates.items()}
        return self.b.finish(outputs, updates, self.graph.loss)

    def value(self, value: Value) -> Value:
        """What takes the place of a value."""
        if value not in self.other:
            return value
        if value not in self.now:
            b, other = self.b, self.other[value]
            wanted, there = _cut(value), _cut(other)
            b.scope = f"{value.name}/"
            if wanted != there:
                other = other if there is None else gathered(b, other, there, _whole(other))
                other = other if wanted is None else own_part(b, other, wanted)
            self.now[value], b.scope = other, ""
        return self.now[value]
