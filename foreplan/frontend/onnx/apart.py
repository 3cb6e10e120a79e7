"""What an exporter computes once for several parts of the module, since they were equal: computed for each part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.draft import Draft
from foreplan.frontend.onnx.signature import Call, set_scope

if TYPE_CHECKING:
    import onnx


def take_apart(draft: Draft) -> None:
    """Give each part of the module nodes of its own, where the exporter has merged them.

    Layers that are copies of one another split or turn a matrix that the exporter has merged, or multiply the same data
    by it, as decoders do with the memory. The exporter merges these nodes too. Afterwards the readers of each such node
    stand in one part, so that a tensor that it reads may be another one in each.
    """
    if not draft.exporter.signature.kinds:
        return
    parts = _Parts.of(draft)
    for index, slot, scope in [*_elsewhere(draft, parts), *_mirrored(draft, parts)]:
        name = draft.graph.node[index].input[slot]
        draft.change().node[index].input[slot] = parts.copy(draft, name, parts.scopes[name], scope)


@dataclass
class _Parts:
    """Nodes, and the parts of the module that they belong to.

    Attributes:
        makers: nodes, by their outputs.
        turned: outputs that are computed from tensors of the file alone, the module's among them.
        scopes: the path of the module to which each output belongs.
        copies: for (output, path): the output of the copy for that path.
    """

    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    turned: set[str] = field(default_factory=set)
    scopes: dict[str, str] = field(default_factory=dict)
    copies: dict[tuple[str, str], str] = field(default_factory=dict)

    @staticmethod
    def of(draft: Draft) -> _Parts:
        exporter, found = draft.exporter, _Parts()
        constant = {tensor.name for tensor in draft.graph.initializer}
        learned = {name for name in draft.floats() if name in exporter.kinds or exporter.learned_source(name)}
        for node in draft.graph.node:
            call = Call.of(node)
            found.makers.update(dict.fromkeys(node.output, node))
            found.scopes.update(dict.fromkeys(node.output, call.scope) if call else ())
            bodies = any(attribute.HasField("g") for attribute in node.attribute)
            if not bodies and all(name in constant for name in node.input if name):
                constant.update(node.output)
                if not learned.isdisjoint(node.input):
                    learned.update(node.output)
                    found.turned.update(node.output)
        return found

    def belong(self, name: str, scope: str) -> None:
        """What is computed of tensors alone belongs to the part that reads it first, as does what it is made of."""
        if name in self.turned and name not in self.scopes:
            for made in self.makers[name].output:
                self.scopes[made] = scope
            for each in self.makers[name].input:
                self.belong(each, scope)

    def copy(self, draft: Draft, name: str, old: str, new: str) -> str:
        """The same result for another part, of a node of its own, with what this part computes on the way to it."""
        if (name, new) not in self.copies:
            maker = self.makers[name]
            node = draft.change().node.add()
            node.CopyFrom(maker)
            node.name = draft.claim(node.name)
            set_scope(node, new + self.scopes[name].removeprefix(old) if _within(self.scopes[name], old) else new)
            for slot, each in enumerate(maker.input):
                if each in self.makers and _within(self.scopes.get(each, ""), old):
                    node.input[slot] = self.copy(draft, each, old, new)
            for slot, made in enumerate(maker.output):
                node.output[slot] = self.copies[made, new] = draft.claim(made)
        return self.copies[name, new]


def _elsewhere(draft: Draft, parts: _Parts) -> Iterator[tuple[int, int, str]]:
    """Readers, in another part, of what is computed of tensors alone: node, input, and the reader's part."""
    for index, node in enumerate(draft.graph.node):
        call = Call.of(node)
        if call is None or not parts.turned.isdisjoint(node.output):
            continue
        for slot, name in enumerate(node.input):
            if name in parts.turned:
                for made in parts.makers[name].input:
                    parts.belong(made, call.scope)
                parts.belong(name, call.scope)
                if parts.scopes[name] != call.scope:
                    yield index, slot, call.scope


def _mirrored(draft: Draft, parts: _Parts) -> Iterator[tuple[int, int, str]]:
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
            if name in parts.makers and name not in parts.turned:
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
