"""Choosing what a step returns."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from foreplan.base.errors import UsageError
from foreplan.graph import Graph
from foreplan.passes.base import Pass


@dataclass(frozen=True)
class SelectOutputs(Pass, requires=("forward",), ensures=("forward",)):
    """The graph returning just these: outputs by their names, or any other value by its own.

    Raises:
        UsageError: no output and no value has that name.
    """

    names: Iterable[str]

    def _run(self, graph: Graph) -> Graph:
        values = {value.name: value for value in graph.values()}
        chosen = {}
        for name in self.names:
            value = graph.outputs.get(name) or values.get(name)
            if value is None:
                close = difflib.get_close_matches(name, [*graph.outputs, *values], 1)
                hint = f"; did you mean {close[0]!r}?" if close else "."
                raise UsageError(
                    f"graph {graph.name!r} has no output {name!r}{hint} Its outputs are {', '.join(graph.outputs)}."
                )
            chosen[name] = value
        same = [*chosen.items()] == [*graph.outputs.items()]  # in their order
        return graph if same else dataclasses.replace(graph, outputs=chosen)
