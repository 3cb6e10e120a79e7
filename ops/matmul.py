"""Matrix product, batched, either side transposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.errors import ShapeError
from foreplan.graph import Builder, Cost, Op, TensorType, Value, register
from foreplan.graph.op import Arrays, Types
from foreplan.graph.types import broadcast_shapes
from foreplan.ops.reduce import sum_to_shape
from foreplan.ops.shape import reshape


@register
@dataclass(frozen=True)
class MatMul(Op):
    """y[…, m, n] = Σ_k a[…, m, k] · b[…, k, n]; leading axes broadcast.

    Attributes:
        transpose_a: `a` is given as […, k, m].
        transpose_b: `b` is given as […, n, k].
    """

    name: ClassVar[str] = "matmul"
    transpose_a: bool = False
    transpose_b: bool = False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Both operands have at least two axes, one element type, and equal inner extents."""
        a, b = inputs
        if a.rank < 2 or b.rank < 2 or a.dtype != b.dtype:
            raise ShapeError(f"needs two matrices of one element type, and got {a} and {b}")
        m, k = a.shape[-1:-3:-1] if self.transpose_a else a.shape[-2:]
        inner, n = b.shape[-1:-3:-1] if self.transpose_b else b.shape[-2:]
        if k != inner:
            raise ShapeError(f"inner extents differ: {k} in {a}, {inner} in {b}")
        return (a.with_shape((*broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n)),)

    def vjp(
        self, b: Builder, inputs: Sequence[Value], outputs: Sequence[Value], cotangents: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        """da = g·bᵀ and db = aᵀ·g, the latter first: with it done, a's bytes may be free for da."""
        (x, w), (g,) = inputs, cotangents
        assert g is not None
        dw = dx = None
        if b.wants(w):
            if len(w.shape) == 2 and len(x.shape) > 2 and not self.transpose_a:
                # A shared right side: fold the batch into the rows, so that no gradient a batch item is made.
                rows = reshape(b, x, (-1, x.shape[-1]))
                grads = reshape(b, g, (-1, g.shape[-1]))
                dw = matmul(b, grads, rows, True, False) if self.transpose_b else matmul(b, rows, grads, True, False)
            else:
                full = (
                    matmul(b, g, x, True, self.transpose_a)
                    if self.transpose_b
                    else matmul(b, x, g, not self.transpose_a, False)
                )
                dw = sum_to_shape(b, full, w.shape)
        if b.wants(x):
            if self.transpose_a:
                full = matmul(b, w, g, self.transpose_b, True)
            else:
                full = matmul(b, g, w, False, not self.transpose_b)
            dx = sum_to_shape(b, full, x.shape)
        return [dx, dw]

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """The last two axes as BLAS takes them: one of them dense, the other with a step of whole rows."""
        rows, columns, item = strides[-2], strides[-1], input.dtype.itemsize
        m, n = input.shape[-2:]
        return (columns == item and rows >= n * item) or (rows == item and columns >= m * item)

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """2·m·n·k a matrix."""
        k = inputs[0].shape[-2 if self.transpose_a else -1]
        return Cost(2 * outputs[0].size * k, sum(type.nbytes for type in (*inputs, *outputs)))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """NumPy's matmul, which hands each matrix to BLAS."""
        a, b = inputs
        a = a.swapaxes(-1, -2) if self.transpose_a else a
        b = b.swapaxes(-1, -2) if self.transpose_b else b
        np.matmul(a, b, out=outputs[0])


def matmul(b: Builder, x: Value, y: Value, transpose_a: bool = False, transpose_b: bool = False) -> Value:
    """x·y, either one transposed first."""
    return b.apply(MatMul(transpose_a, transpose_b), x, y)
