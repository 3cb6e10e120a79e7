"""Nodes of an ONNX graph in an order in which they can run. Files should have such an order, and usually do."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from foreplan.base.errors import ModelError

if TYPE_CHECKING:
    import onnx


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, those that its branches take from outside included."""
    yield from (name for name in (*node.input, *named_reads(node)) if name)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            inner = {value.name for value in attribute.g.input} | {t.name for t in attribute.g.initializer}
            inner |= {name for other in attribute.g.node for name in other.output}
            for other in attribute.g.node:
                yield from (name for name in reads(other) if name not in inner)
            yield from (value.name for value in attribute.g.output if value.name not in inner)


def named_reads(node: onnx.NodeProto) -> list[str]:
    """Tensors that an attribute names: what a Gradient differentiates."""
    if (node.domain, node.op_type) != ("ai.onnx.preview.training", "Gradient"):
        return []
    return [attribute.s.decode() for attribute in node.attribute if attribute.name == "y"]


def in_order(
    nodes: Sequence[onnx.NodeProto], label: str, given: Container[str] = ()
) -> list[tuple[int, onnx.NodeProto]]:
    """(place in the file, node), each behind the nodes that it reads; the file's own order if that is valid.

    Args:
        label: of the model, for errors.
        given: names of the graph's inputs and initializers, which no node may give again.

    Raises:
        ModelError: a tensor is given twice, or nodes wait for each other in a circle.
    """
    maker: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in given:
                raise ModelError(
                    f"{label}: the tensor {name!r} is given twice, as an input or initializer and by {_text(node)}: "
                    "rename one of them, in the module before the export or in the file"
                )
            if name in maker:
                both = f"{_text(nodes[maker[name]])} and {_text(node)}"
                raise ModelError(f"{label}: two nodes give the tensor {name!r}: {both}")
            maker[name] = i
    waits = [{maker[name] for name in reads(node) if name in maker} for node in nodes]
    if all(all(other < i for other in before) for i, before in enumerate(waits)):
        return list(enumerate(nodes))
    order: list[int] = []
    left = dict(enumerate(waits))
    followers: dict[int, list[int]] = {}
    for i, before in left.items():
        for other in before:
            followers.setdefault(other, []).append(i)
    ready = [i for i, before in left.items() if not before]
    while ready:
        i = ready.pop(0)
        order.append(i)
        del left[i]
        for other in followers.get(i, ()):
            left[other].discard(i)
            if not left[other]:
                ready.append(other)
    if left:
        circle = _circle(left)
        path = " → ".join(_text(nodes[i]) for i in (*circle, circle[0]))
        raise ModelError(f"{label}: nodes wait for each other in a circle: {path}")
    return [(i, nodes[i]) for i in order]


def _circle(waits: dict[int, set[int]]) -> list[int]:
    """Nodes of one circle, each feeding the next."""
    at, path = next(iter(waits)), []
    while at not in path:
        path.append(at)
        at = min(waits[at])
    return path[path.index(at) :][::-1]


def _text(node: onnx.NodeProto) -> str:
    return f"{node.name or ', '.join(node.output)!r} ({node.op_type})"
