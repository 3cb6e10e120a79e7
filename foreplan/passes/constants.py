"""Values that constants alone determine, computed at once."""

from __future__ import annotations

import numpy as np

from foreplan.graph import Graph, Value
from foreplan.ops.evaluate import computed, content, is_computed, is_known


class Known:
    """Values of a graph that constants alone determine, each computed when it is asked for, and once."""

    def __init__(self, graph: Graph, most: int) -> None:
        """Of a graph.

        Args:
            most: the most bytes of a value that is computed.
        """
        self.graph, self.arrays = graph, dict[Value, np.ndarray]()
        self.decided = {value for value in graph.stored if is_known(value)}
        for node in graph.nodes:
            few = len(node.outputs) == 1 and node.outputs[0].type.nbytes <= most
            if few and is_computed(node.op) and self.decided.issuperset(node.inputs):
                self.decided.update(node.outputs)

    def array(self, value: Value) -> np.ndarray:
        """The content of one of those `decided`."""
        if value not in self.arrays:
            node = self.graph.producer.get(value)
            if node is None:
                self.arrays[value] = content(value)
            else:
                (self.arrays[value],) = computed(node.op, [self.array(each) for each in node.inputs])
        return self.arrays[value]
