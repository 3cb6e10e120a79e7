"""A trace whose nodes belong to another program's modules and lines."""

from __future__ import annotations

from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import Tracer
from foreplan.graph import Builder
from foreplan.ops.marks import ByMode


class Lines(Tracer):
    """A trace whose nodes have the module paths and source lines of another program."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._line = ""

    def place(self, path: str, line: str) -> None:
        """Where what comes next belongs."""
        self._builder.scope = f"{path}/" if path else ""
        self._line = line

    def by_mode(self, inference: Tensor, training: Tensor) -> Tensor:
        """What inference gives, and what training does; one tensor for both is itself."""
        if inference.value is training.value:
            return training
        return Tensor(self, self.at().apply(ByMode(), inference.value, training.value))

    def at(self) -> Builder:
        """The builder, with new nodes attributed to the current line."""
        self._builder.source = self._line
        return self._builder
