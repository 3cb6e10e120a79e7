"""The tensors that nodes can read by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.nested_tensors import Path
from foreplan.frontend.onnx.node import Operand
from foreplan.frontend.onnx.roles import Role
from foreplan.frontend.onnx.sequences import Tensors
from foreplan.graph import Value

if TYPE_CHECKING:
    import onnx


class Scope:
    """The tensors that nodes can read by name, in a graph, a called function, or a branch or loop within one.

    Attributes:
        prefix: begins the names of tensors made here, so that they are unique in the model.
        roles: what the tensors of this scope are to the model.
        opsets: domain → version that nodes here are written for.
        names: of tensors of a function that have another name outside.
        taken: whether the branch that this is in is taken, where that depends on data.
        path: where the file has it; None within functions, which may be called in several places.
    """

    def __init__(
        self,
        prefix: str,
        roles: Mapping[str, Role],
        opsets: Mapping[str, int],
        outer: Scope | None = None,
        depth: int = 0,
        taken: Value | None = None,
        path: Path | None = None,
    ) -> None:
        self.prefix = prefix
        self.roles = roles
        self.opsets = opsets
        self.outer = outer
        self.depth = depth
        self.taken = taken
        self.path = path
        self.names: dict[str, str] = {}
        self.tensors: dict[str, Operand | Tensors | None] = {}
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.attributes: Mapping[str, onnx.AttributeProto] = {}

    def full_name(self, name: str) -> str:
        """The name of a tensor made here, unique in the model."""
        return self.names.get(name, self.prefix + name)
