"""Which tensors of a program are written in place."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foreplan.frontend.torch.table import entry

if TYPE_CHECKING:
    import torch


def op_name(target: Any) -> str:
    """An op as the table calls it: ATen's by their own names, others with that of their library."""
    library, _, name = target._schema.name.partition("::")
    return name if library == "aten" else f"{library}::{name}"


def attribute(owner: Any, path: str) -> Any:
    """What a dotted path of a graph's owner leads to."""
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def written_by(node: torch.fx.Node) -> list[Any]:
    """The arguments that an op writes, as the node has them."""
    target: Any = node.target
    arguments = enumerate(target._schema.arguments)
    written = [(i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in written]


def writes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes whose tensors are written in place, themselves or through a view, as far as a graph shows."""
    import torch

    found: set[torch.fx.Node] = set()
    sources: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            sources[node] = node.args[0]
        elif isinstance(node.target, torch._ops.OpOverload):
            name = op_name(node.target)
            known = entry(name)
            places = written_by(node)
            seen = places or (node.args[:1] if known is not None and known.views else ())
            sources.update((node, each) for each in seen[:1] if isinstance(each, torch.fx.Node))
            if name in ("batch_norm", "instance_norm"):
                places += [each for each in node.args[3:5] if each is not None]
            found.update(each for each in places if isinstance(each, torch.fx.Node))
        else:
            found.update(_written_within(node))
    for node in list(found):
        while node in sources:
            node = sources[node]
            found.add(node)
    return found


def _written_within(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What a region writes of its arguments."""
    import torch

    for each in node.args:
        if isinstance(each, torch.fx.Node) and each.op == "get_attr":
            body = attribute(node.graph.owning_module, each.target)
            if not hasattr(body, "graph"):
                continue
            inner = writes(body.graph)
            holders = [holder for holder in body.graph.nodes if holder.op == "placeholder"]
            given = [other for other in node.args if isinstance(other, torch.fx.Node) and other.op != "get_attr"]
            yield from (place for holder, place in zip(holders, given[len(given) - len(holders) :]) if holder in inner)
