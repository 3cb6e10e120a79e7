"""Nodes of several layers that the exporter has merged: each layer gets its own again.

Where layers start equal, `torch.onnx.export(…, dynamo=True)` merges their weights, and then equal nodes that read them:
those that split or transpose a merged matrix, and those that multiply the same data by it. The sign is a reader whose
metadata name another module than those of the node that it reads, while that other module has weights of its own that
the file lacks. Such nodes are copied for the reader's module; `merged_weights` then gives the copies their weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.module.draft import Draft
from foreplan.frontend.onnx.module.signature import Call, set_scope

if TYPE_CHECKING:
    import onnx


def split_merged_nodes(draft: Draft) -> None:
    """Copy merged nodes for each module that reads them: afterwards all readers of such a node stand in one module, so
    that its weights may be others in each. A decoder that multiplies the memory in every layer needs this.
    """
    if not draft.exporter.signature.kinds:
        return
    parts = _Parts.of(draft)
    for index, slot, scope in [*_shared_weight_reads(draft, parts), *_shared_data_reads(draft, parts)]:
        name = draft.graph.node[index].input[slot]
        way = parts.producers_within(name, parts.scopes[name])
        if parts.has_lost_weights(draft, way, parts.scopes[name], scope):
            parts.copy(draft, way, parts.scopes[name], scope)
            draft.change().node[index].input[slot] = parts.copies[name, scope]


@dataclass
class _Parts:
    """Nodes, and the parts of the module that they belong to.

    Attributes:
        makers: nodes, by their outputs.
        computed: outputs that are computed from tensors of the file alone, the module's among them.
        scopes: the path of the module to which each output belongs.
        origins: for each tensor of the module in the file, and each computed from one: that tensor.
        copies: for (output, path): the output of the copy for that path.
    """

    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    scopes: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    copies: dict[tuple[str, str], str] = field(default_factory=dict)

    @staticmethod
    def of(draft: Draft) -> _Parts:
        exporter, found = draft.exporter, _Parts()
        constant = {tensor.name for tensor in draft.graph.initializer}
        for name in draft.floats():
            if origin := name if name in exporter.kinds else exporter.learned_source(name):
                found.origins[name] = origin
        learned = set(found.origins)
        for node in draft.graph.node:
            call = Call.of(node)
            found.makers.update(dict.fromkeys(filter(None, node.output), node))
            found.scopes.update(dict.fromkeys(node.output, call.scope) if call else ())
            bodies = any(attribute.HasField("g") for attribute in node.attribute)
            if not bodies and all(name in constant for name in node.input if name):
                constant.update(node.output)
                if not learned.isdisjoint(node.input):
                    learned.update(node.output)
                    found.computed.update(node.output)
        return found

    def assign_scope(self, name: str, scope: str) -> None:
        """What is computed of tensors alone belongs to the part that reads it first, as does what it is made of."""
        left = [name]
        while left:
            at = left.pop()
            if at in self.computed:
                for made in self.makers[at].output:
                    scope = self.scopes.setdefault(made, scope)
                left += [each for each in self.makers[at].input if each not in self.scopes]

    def producers_within(self, name: str, part: str) -> list[onnx.NodeProto]:
        """The nodes of one part on the way to a result."""
        found: dict[str, onnx.NodeProto] = {}
        left = [name]
        while left:
            at = left.pop()
            if at in self.makers and self.makers[at].output[0] not in found and _within(self.scopes.get(at, ""), part):
                found[self.makers[at].output[0]] = self.makers[at]
                left += self.makers[at].input
        return list(found.values())

    def has_lost_weights(self, draft: Draft, way: list[onnx.NodeProto], old: str, new: str) -> bool:
        """Whether another part has tensors in the places of those that these nodes read, which the file has lost."""
        for node in way:
            path = new + self.scopes[node.output[0]].removeprefix(old)
            own = {f"{path}.{_last(self.origins[name])}" for name in node.input if name in self.origins}
            if any(each in draft.exporter.signature.kinds and each not in self.origins for each in own):
                return True
        return False

    def copy(self, draft: Draft, way: list[onnx.NodeProto], old: str, new: str) -> None:
        """The same nodes for another part."""
        way = [node for node in way if (node.output[0], new) not in self.copies]
        for node in way:
            self.copies.update({(name, new): draft.claim(name) for name in node.output})
        for node in way:
            copy = draft.change().node.add()
            copy.CopyFrom(node)
            copy.name = draft.claim_node(node.name)
            set_scope(copy, new + self.scopes[node.output[0]].removeprefix(old))
            copy.input[:] = [self.copies.get((name, new), name) for name in node.input]
            copy.output[:] = [self.copies[name, new] for name in node.output]


def _shared_weight_reads(draft: Draft, parts: _Parts) -> Iterator[tuple[int, int, str]]:
    """Readers, in another part, of what is computed of tensors alone: node, input, and the reader's part."""
    for index, node in enumerate(draft.graph.node):
        call = Call.of(node)
        if call is None or not parts.computed.isdisjoint(node.output):
            continue
        for slot, name in enumerate(node.input):
            if name in parts.computed:
                parts.assign_scope(name, call.scope)
                if parts.scopes[name] != call.scope:
                    yield index, slot, call.scope


def _shared_data_reads(draft: Draft, parts: _Parts) -> Iterator[tuple[int, int, str]]:
    """Readers of data that were another result in the module: node, input, and the reader's part.

    A node of another part reads the same at the same place. Its call names what it reads, and the reader's call names
    another result there, which no node gives; or what it reads stands within its call, and so in no other one.
    """
    calls = {index: call for index, node in enumerate(draft.graph.node) if (call := Call.of(node)) is not None}
    given = {call.value for call in calls.values()} | parts.makers.keys() | draft.exporter.signature.targets.keys()
    given |= {info.name for info in draft.graph.input}
    readers: dict[tuple[str, int, str, str], list[int]] = {}
    for index, call in calls.items():
        node = draft.graph.node[index]
        for slot, name in enumerate(node.input):
            if name in parts.makers and name not in parts.computed:
                readers.setdefault((name, slot, node.op_type, call.op), []).append(index)
    for (name, slot, _, _), (first, *rest) in readers.items():
        maker, mirror = Call.of(parts.makers[name]), calls[first]
        if maker is None or maker.scope != mirror.scope:
            continue
        inside = maker.value == mirror.value and name != maker.value  # of one call, which no other one reads
        place = list(mirror.args).index(maker.value) if maker.value in mirror.args else len(mirror.args)
        for index in rest:
            call = calls[index]
            other = inside or any(arg not in given for arg in call.args[place : place + 1])
            if call.scope != maker.scope and call.value != maker.value and other:
                yield index, slot, call.scope


def _within(scope: str, part: str) -> bool:
    return bool(part) and (scope == part or scope.startswith(f"{part}."))


def _last(name: str) -> str:
    return name.rpartition(".")[2]
