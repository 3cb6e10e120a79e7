"""A file's graph on its way to be as the module has it: copied before the first change, as the file is the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.module.exporter import Exporter
from foreplan.frontend.onnx.tensors import FLOATS
from foreplan.graph.names import Names

if TYPE_CHECKING:
    import onnx


@dataclass
class Draft:
    """A graph, what its exporter tells, and what people should know of the changes.

    Attributes:
        graph: as it is now.
        exporter: what is told of its tensors.
        notes: one for each kind of change.
    """

    graph: onnx.GraphProto
    exporter: Exporter
    notes: list[str] = field(default_factory=list)
    _names: Names | None = None
    _node_names: Names = field(default_factory=Names)

    def floats(self) -> dict[str, onnx.TensorProto]:
        """The initializers of floats, by name."""
        return {tensor.name: tensor for tensor in self.graph.initializer if tensor.data_type in FLOATS}

    def change(self) -> onnx.GraphProto:
        """The graph, which may be changed."""
        if self._names is None:
            own = type(self.graph)()
            own.CopyFrom(self.graph)
            self.graph = own
            self._names = Names(name for node in own.node for name in (*node.input, *node.output))
            self._names.take(tensor.name for tensor in own.initializer)
            self._names.take(info.name for info in own.input)
            self._node_names.take(node.name for node in own.node)
        return self.graph

    def claim(self, name: str) -> str:
        """A name like this one that no tensor has."""
        self.change()
        assert self._names is not None
        return self._names.claim(name)

    def claim_node(self, name: str) -> str:
        """A name like this one that no node has."""
        self.change()
        return self._node_names.claim(name)

    def record(self, kinds: Mapping[str, str] | None = None, sources: Mapping[str, list[str]] | None = None) -> None:
        """Add to what is told of tensors: their kinds, and what they were computed from."""
        told = self.exporter
        self.exporter = replace(
            told, kinds={**told.kinds, **(kinds or {})}, sources={**told.sources, **(sources or {})}
        )
