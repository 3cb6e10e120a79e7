"""Building graphs: values and nodes, frozen and checked."""

from __future__ import annotations

from collections.abc import Mapping

from foreplan.graph.ir import Graph
from foreplan.graph.op import Builder
from foreplan.graph.value import Value
from foreplan.graph.verify import verify_graph


class GraphBuilder(Builder):
    """Freezes what it collects into a Graph."""

    def __init__(self, name: str = "graph", base: Graph | None = None) -> None:
        super().__init__(name if base is None else base.name)
        if base is not None:
            self.inputs, self.stored, self.notes = list(base.inputs), list(base.stored), list(base.notes)
            self.nodes, self._inferred = list(base.nodes), set(base.nodes)
            self.reserve((*base.inputs, *base.stored), base.nodes)

    def finish(
        self,
        outputs: Mapping[str, Value],
        updates: Mapping[Value, Value] | None = None,
        loss: Value | None = None,
        gradients: Mapping[str, Value] | None = None,
    ) -> Graph:
        """Freeze and check what was built.

        Raises:
            ModelError: the graph breaks a rule of `verify_graph`.
        """
        graph = Graph(
            name=self.name,
            inputs=tuple(self.inputs),
            stored=tuple(self.stored),
            nodes=tuple(self.nodes),
            outputs=dict(outputs),
            updates=dict(updates or {}),
            loss=loss,
            gradients=dict(gradients or {}),
            notes=tuple(self.notes),
        )
        verify_graph(graph, self._inferred)
        return graph
