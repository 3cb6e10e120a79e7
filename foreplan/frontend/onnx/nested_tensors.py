"""Tensors that graphs within nodes hold: branches, and bodies of loops, which hold one for all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.tensors import Constant

if TYPE_CHECKING:
    import onnx

# The way to a graph within others: of each graph the index of the node, and the attribute that has the next one.
Path = tuple[tuple[int, str], ...]
# The way to a graph, and the name of an initializer or the index of a node in it.
Place = tuple[Path, str | int]


class NestedTensors:
    """What graphs within nodes hold, by where the file has it."""

    def __init__(self) -> None:
        self._held: dict[Place, Constant] = {}

    def one(self, path: Path | None, key: str | int, make: Callable[[], Constant]) -> Constant:
        """The tensor at a place, made when a step first reads it.

        Args:
            path: of the graph; None within functions, where each call has tensors of its own.
            key: the name of an initializer, or the index of a node.
            make: makes the tensor.
        """
        if not path:
            return make()
        if (path, key) not in self._held:
            self._held[path, key] = make()
        return self._held[path, key]

    def of_stored(self) -> dict[str, Place]:
        """By the names of stored values, where the file has them."""
        return {tensor.value.name: place for place, tensor in self._held.items() if tensor.value is not None}


def graph_at(graph: onnx.GraphProto, path: Path) -> onnx.GraphProto:
    """The graph at the end of a way."""
    for index, name in path:
        graph = next(attribute.g for attribute in graph.node[index].attribute if attribute.name == name)
    return graph
