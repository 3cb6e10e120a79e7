"""Matrix product, batched, either side transposed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, as_dtype, register
from foreplan.graph.axes import Axes, Factors
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.graph.types import broadcast_shapes
from foreplan.ops.blocks import carve_bytes
from foreplan.ops.map import convert
from foreplan.ops.narrow_product import narrow_product, tile_pieces
from foreplan.ops.shape import reshape, sum_to_shape

PRODUCT_BYTES = 2 * 2**20  # rows of a product that are added to another tensor


@register
@dataclass(frozen=True)
class MatMul(Op):
    """y[…, m, n] = Σ_k a[…, m, k] · b[…, k, n] (+ c[…, m, n], a third input); leading axes broadcast.

    Attributes:
        transpose_a: `a` is given as […, k, m].
        transpose_b: `b` is given as […, n, k].
        wide: narrow operands give a wide product (see `DType.wide`).
    """

    name: ClassVar[str] = "matmul"
    narrow: ClassVar[int] = 2
    accumulates: ClassVar[int] = 2
    transpose_a: bool = False
    transpose_b: bool = False
    wide: bool = False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Both operands have at least two axes, one element type, and equal inner extents; c is as the product."""
        a, b, *base = inputs
        if a.rank < 2 or b.rank < 2 or a.dtype != b.dtype:
            raise ShapeError(f"needs two operands of one element type with at least two axes, and got {a} and {b}")
        m, k = a.shape[-1:-3:-1] if self.transpose_a else a.shape[-2:]
        inner, n = b.shape[-1:-3:-1] if self.transpose_b else b.shape[-2:]
        if k != inner:
            raise ShapeError(f"inner extents differ: {k} in {a}, {inner} in {b}")
        dtype = a.dtype.wide if self.wide else a.dtype
        product = TensorType(dtype, (*broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n))
        if len(base) > 1 or any(type != product for type in base):
            raise ShapeError(f"the tensor that the product is added to must be {product}, and is {base[0]}")
        return (product,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """a [l…, m, k] · b [l…, k, n] → [l…, m, n], a sum over k."""
        f, (a, b), lead = Factors(), inputs[:2], outputs[0].rank - 2
        m, k = f.dim(("m", outputs[0].shape[-2])), f.dim(("k", a.shape[-2 if self.transpose_a else -1]))
        n = f.dim(("n", outputs[0].shape[-1]))
        left = (*f.spread("l", a.shape[:-2], lead), *((k, m) if self.transpose_a else (m, k)))
        right = (*f.spread("l", b.shape[:-2], lead), *((n, k) if self.transpose_b else (k, n)))
        y = (*f.row("l", outputs[0].shape[:-2]), m, n)
        return f.axes([left, right, *[y] * (len(inputs) - 2)], [y], sums={"k": "sum"})

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """db = aᵀ·g first, then da = g·bᵀ, which may take a's bytes; dc = g."""
        (x, w), (whole,) = inputs[:2], cotangents
        assert whole is not None
        g = convert(b, whole, x.dtype)
        dw = dx = None
        if b.wants(w):
            if len(w.shape) == 2 and len(x.shape) > 2 and not self.transpose_a:
                # A shared right side: fold the batch into the rows; so there is no separate gradient for each item.
                count = math.prod(x.shape[:-1])  # the size does not tell this if rows have no elements
                rows, grads = reshape(b, x, (count, x.shape[-1])), reshape(b, g, (count, g.shape[-1]))
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
        return [dx, dw, *[whole] * (len(inputs) - 2)]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """The third input may be changed in place."""
        return ((0, 2),) if len(inputs) == 3 else ()

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """The last two axes as BLAS takes them: one of them dense, the other with a step of whole rows."""
        if index == 2:
            return True
        rows, columns, item = strides[-2], strides[-1], input.dtype.itemsize
        m, n = input.shape[-2:]
        return (columns == item and rows >= n * item) or (rows == item and columns >= m * item)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """2·m·n·k a matrix, and an addition an element of c."""
        k = inputs[0].shape[-2 if self.transpose_a else -1]
        return (2 * k + len(inputs) - 2) * outputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Some rows of a product that is added to c; of narrow operands some tiles."""
        a = inputs[0]
        if a.dtype.is_narrow:
            k = a.shape[-2 if self.transpose_a else -1]
            return carve_bytes(*tile_pieces(outputs[0].shape[-2], k, outputs[0].shape[-1]))
        return self._rows(outputs[0]) * outputs[0].shape[-1] * outputs[0].dtype.itemsize if len(inputs) == 3 else 0

    def _rows(self, product: TensorType) -> int:
        row = max(1, product.shape[-1] * product.dtype.itemsize)
        return max(1, min(product.shape[-2], PRODUCT_BYTES // row))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """NumPy's matmul, which passes each matrix to BLAS; products are added to c some rows at a time.

        Of narrow operands, tiles in float32.
        """
        a, b, *base = inputs
        a = a.swapaxes(-1, -2) if self.transpose_a else a
        b = b.swapaxes(-1, -2) if self.transpose_b else b
        (y,) = outputs
        if as_dtype(a.dtype).is_narrow:
            a, b = (np.broadcast_to(x, (*y.shape[:-2], *x.shape[-2:])) for x in (a, b))
            for index in np.ndindex(y.shape[:-2]):
                narrow_product(a[index], b[index], base[0][index] if base else None, y[index], workspace)
            return
        if not base:
            np.matmul(a, b, out=y)
            return
        np.copyto(y, base[0])
        a, b = (np.broadcast_to(x, (*y.shape[:-2], *x.shape[-2:])) for x in (a, b))
        rows = self._rows(TensorType(as_dtype(y.dtype), y.shape))
        memory = workspace.view(y.dtype)
        for index in np.ndindex(y.shape[:-2]):
            for start in range(0, y.shape[-2], rows):
                part = y[index][start : start + rows]
                product = memory[: part.size].reshape(part.shape)
                np.matmul(a[index][start : start + rows], b[index], out=product)
                part += product


def matmul(b: Builder, x: Value, y: Value, transpose_a: bool = False, transpose_b: bool = False) -> Value:
    """x·y, either one transposed first."""
    return b.apply(MatMul(transpose_a, transpose_b), x, y)
