"""A trace whose nodes belong to another program's modules and lines."""

from __future__ import annotations

from foreplan.frontend.tracing.tracer import Tracer
from foreplan.graph import Builder


class Lines(Tracer):
    """A trace whose nodes have the module paths and source lines of another program."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._line = ""

    def place(self, path: str, line: str) -> None:
        """Where what comes next belongs."""
        self._builder.scope = f"{path}/" if path else ""
        self._line = line

    def at(self) -> Builder:
        """The builder, with new nodes attributed to the current line."""
        self._builder.source = self._line
        return self._builder
