"""A builder of graphs that come from files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from foreplan.base.errors import UnsupportedError
from foreplan.graph import Builder, GraphBuilder, Initializer, Op, TensorType, Value
from foreplan.graph.value import Kind


class OnnxBuilder(GraphBuilder):
    """A Builder whose stored values never take a name that the file has, and that stops at `most` nodes."""

    def __init__(self, name: str, claim: Callable[[str], str], most: int) -> None:
        super().__init__(name)
        self._claim_name, self._most = claim, most

    def node(self, op: Op, *inputs: Value, name: str = "", outputs: Iterable[str] = ()) -> tuple[Value, ...]:
        """As `Builder.node`, until there are `most` nodes."""
        if len(self.nodes) >= self._most:
            raise UnsupportedError(
                f"with it the model comes to more than {self._most} nodes: each step of a loop or of a recurrent layer "
                "makes nodes of its own; use fewer steps"
            )
        return super().node(op, *inputs, name=name, outputs=outputs)

    def store(self, name: str, type: TensorType, kind: Kind, init: Initializer, why: str = "") -> Value:
        """A constant that a translation makes (a mask, a range of positions)."""
        value = Value(self._claim_name(name), type, kind, init, why)
        self.stored.append(value)
        return value


def sources_of(b: Builder, *values: Value) -> list[Value]:
    """The graph's inputs that values are computed from, in their order."""
    makers = {made: node for node in b.nodes for made in node.outputs}
    seen, left = set(), list(values)
    while left:
        at = left.pop()
        if at not in seen:
            seen.add(at)
            left += makers[at].inputs if at in makers else ()
    return [each for each in b.inputs if each in seen]
