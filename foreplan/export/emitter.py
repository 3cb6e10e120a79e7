"""ONNX nodes under construction: names, constants, and the op that is being written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.export.table import translation_of
from foreplan.frontend.onnx.tensors import ONNX_DTYPES
from foreplan.graph import DType, Op, TensorType, as_dtype
from foreplan.graph.names import Names

if TYPE_CHECKING:
    import onnx


class Emitter:
    """Collects the nodes and constants of an ONNX graph. Translations of ops call its methods.

    Attributes:
        nodes: in the order in which they were made.
        constants: initializers that translations have made.
        names: all names of tensors so far.
        scope: begins the names of nodes and of tensors between them: the name of the node in foreplan's graph.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.names = Names(names)
        self.scope = ""
        self._node_names = Names()
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def node(self, op_type: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """A node of several results. Attributes that are None are left out."""
        from onnx.helper import make_node

        names = [self.names.claim(f"{self.scope}/{op_type}") for _ in range(outputs)]
        name = self._node_names.claim(f"{self.scope}/{op_type}")
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(make_node(op_type, list(inputs), names, name, **given))
        return names

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """A node of one result."""
        return self.node(op_type, inputs, 1, **attributes)[0]

    def copy(self, x: str, name: str) -> None:
        """The same tensor under another name."""
        from onnx.helper import make_node

        self.nodes.append(make_node("Identity", [x], [name], self._node_names.claim(f"{name}/Identity")))

    def constant(self, array: np.ndarray) -> str:
        """A constant; equal ones are one."""
        from onnx.helper import make_tensor

        array = np.ascontiguousarray(array).reshape(np.shape(array))
        dtype = as_dtype(array.dtype).name
        key = dtype, array.shape, array.tobytes()
        if key not in self._known:
            name = self._known[key] = self.names.claim(f"const_{len(self._known)}")
            self.constants.append(make_tensor(name, ONNX_DTYPES[dtype], array.shape, key[2], raw=True))
        return self._known[key]

    def ints(self, numbers: Iterable[int]) -> str:
        """A constant int64 vector: a shape, axes."""
        return self.constant(np.array(list(numbers), np.int64))

    def scalar(self, number: float, dtype: DType) -> str:
        """A constant of no axes."""
        return self.constant(np.array(number, dtype.numpy))

    def cast(self, x: str, before: DType, after: DType) -> str:
        """`x` in another element type."""
        return x if before == after else self.op("Cast", x, to=ONNX_DTYPES[after.name])

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """`x` in another shape."""
        return self.op("Reshape", x, self.ints(shape), allowzero=1 if 0 in shape else None)

    def transpose(self, x: str, perm: Sequence[int]) -> str:
        """`x` with its axes permuted."""
        return x if list(perm) == sorted(perm) else self.op("Transpose", x, perm=list(perm))

    def expand(self, x: str, before: Sequence[int], after: Sequence[int]) -> str:
        """`x` repeated to a shape."""
        return x if tuple(before) == tuple(after) else self.op("Expand", x, self.ints(after))

    def zeros(self, type: TensorType) -> str:
        """Zeros, which take no space in the file."""
        return self.expand(self.scalar(0, type.dtype), (), type.shape)

    def apply(self, op: Op, inputs: Sequence[str], types: Sequence[TensorType]) -> list[str]:
        """Another op of foreplan's on these inputs."""
        found = translation_of(op, types)
        assert found is not None, f"{op.name} has no translation for {types}"
        return found(self, op, list(inputs), list(types))


def ends_of(pads: Sequence[tuple[int, int]]) -> list[int]:
    """Pads as ONNX writes them: those at the beginning of each axis, and then those at its end."""
    return [low for low, _ in pads] + [high for _, high in pads]
