"""A matrix product with an epilogue: a map of each element before it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Op, TensorType, register
from foreplan.graph.axes import Axes, broadcast_dims
from foreplan.graph.op import Arrays, Types
from foreplan.ops.blocks import carve, carve_bytes
from foreplan.ops.expr import used_args
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul

_BYTE = np.dtype(np.uint8)


@register
@dataclass(frozen=True)
class MatMulMap(Op):
    """y_i = f_i(a · b, c1, c2, …): a product, and a map of it and of further inputs, such as an optimizer's update.

    Inputs: a […, m, k] and b […, k, n], or transposed; then the map's further inputs, broadcast to […, m, n].
    Outputs: one an expression, each […, m, n]. Made for targets that have such a kernel, from a graph that needs no
    derivative any more.

    Attributes:
        exprs: of a0, the product, and the further inputs.
        transpose_a: `a` is given as [k, m].
        transpose_b: `b` is given as [n, k].
    """

    name: ClassVar[str] = "matmul_map"
    exprs: tuple[str, ...] = ("a0",)
    transpose_a: bool = False
    transpose_b: bool = False

    @property
    def matmul(self) -> MatMul:
        """The product alone."""
        return MatMul(self.transpose_a, self.transpose_b)

    @property
    def map(self) -> Map:
        """The map of the product."""
        return Map(self.exprs)

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The map's outputs, which are as large as the product."""
        further, reads = inputs[2:], 2 + max(used_args(*self.map.parsed), default=0)
        if len(inputs) != reads:
            raise ShapeError(f"a product and {', '.join(self.exprs)} read {reads} inputs, and got {len(inputs)}")
        (y,) = self.matmul.infer(inputs[:2])
        outputs = self.map.infer([y, *further])
        if any(type.shape != y.shape for type in outputs):
            raise ShapeError(
                f"the map must give the shape of the product {y}, and gives {', '.join(map(str, outputs))}"
            )
        return outputs

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """As the product's, but all of what it sums."""
        found = self.matmul.indexing(inputs[:2], outputs[:1])
        (y,) = found.outputs
        given = [*found.inputs, *(broadcast_dims(y, x.shape) for x in inputs[2:])]
        return Axes(given, [y] * len(outputs), found.extents, frozenset({"k"}))

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """As the map: the product is complete before the map begins."""
        (y,) = self.matmul.infer(inputs[:2])
        return tuple((o, i + 1) for o, i in self.map.overwrites([y, *inputs[2:]], outputs) if i)

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """As the product; the map reads anything."""
        return index > 1 or self.matmul.accepts_strides(index, input, strides)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """The operations of both."""
        (y,) = product = self.matmul.infer(inputs[:2])
        return self.matmul.flops(inputs[:2], product) + self.map.flops([y, *inputs[2:]], outputs)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """The product, and the larger workspace of both."""
        (y,) = product = self.matmul.infer(inputs[:2])
        needed = self.matmul.workspace(inputs[:2], product), self.map.workspace([y, *inputs[2:]], outputs)
        return carve_bytes((y.shape, y.dtype.numpy), ((max(needed),), _BYTE))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One, then the other."""
        whole = outputs[0].shape, inputs[0].dtype
        product, rest = carve(workspace, whole, ((workspace.size - carve_bytes(whole),), _BYTE))
        self.matmul.compute(inputs[:2], [product], rest)
        self.map.compute([product, *inputs[2:]], outputs, rest)
