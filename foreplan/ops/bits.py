"""Masks of one bit an element: made where a condition is known, and read by element-wise expressions later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Array, Builder, Op, TensorType, Value, register
from foreplan.graph.axes import Axes, broadcast_dims, in_c_order, named
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.graph.types import BOOL, DTYPES, FLOAT32, Shape, broadcast_shapes
from foreplan.graph.value import Kind
from foreplan.ops.blocks import carve, carve_bytes
from foreplan.ops.expr import Arg, call, cast, parse_expr
from foreplan.ops.map import BLOCK, Map, elementwise
from foreplan.ops.pullback import by_parts
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape

BYTE = DTYPES["uint8"]


@register
@dataclass(frozen=True)
class PackBits(Op):
    """bits[i // 8] has bit i % 8 (of value 2^(i % 8)) set where the condition holds for element i of x, in C order.

    Input: x of any type, its number of elements a multiple of 8. Output: uint8[elements / 8].

    Attributes:
        condition: a scalar expression of boolean type over a0.
    """

    name: ClassVar[str] = "pack_bits"
    condition: str

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """An eighth as many bytes as there are elements."""
        (x,) = inputs
        if Map((self.condition,)).infer(inputs)[0].dtype != BOOL or x.size % 8:
            raise ShapeError(f"needs a condition and a multiple of 8 elements, and got {self.condition!r} of {x}")
        return (TensorType(BYTE, (x.size // 8,)),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes | None:
        """Bytes, where ranges of elements fill them."""
        x = inputs[0]
        if not x.size:
            return None
        found = in_c_order(x.shape, (x.size // 8, 8))
        bits, bit = found.outputs[0]
        return replace(found, outputs=((bits,),), whole=found.whole | named([bit]))

    def flops(self, inputs: Types, outputs: Types) -> int:
        """The condition at each element; packing bits is no arithmetic."""
        return Map((self.condition,)).flops(inputs, [inputs[0].with_dtype(BOOL)])

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of truth values, and what the condition needs."""
        x = inputs[0].with_shape((min(BLOCK, inputs[0].size),))
        return carve_bytes((x.shape, BOOL.numpy)) + Map((self.condition,)).workspace([x], [x.with_dtype(BOOL)])

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Block by block."""
        x, bits = inputs[0].reshape(-1), outputs[0]
        (truth,) = carve(workspace, ((min(BLOCK, x.size),), BOOL.numpy))
        rest = workspace[carve_bytes((truth.shape, BOOL.numpy)) :]
        for start in range(0, x.size, BLOCK):
            part = x[start : start + BLOCK]
            Map((self.condition,)).compute([part], [truth[: part.size]], rest)
            bits[start // 8 : (start + part.size) // 8] = np.packbits(truth[: part.size], bitorder="little")

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Eight truth values weighted by powers of two and added."""
        (x,) = inputs
        truth = elementwise(b, parse_expr(self.condition), reshape(b, x, (x.type.size // 8, 8)))
        weighted = elementwise(b, lambda t, w: cast(t, FLOAT32) * cast(w, FLOAT32), truth, _powers(b))
        return [elementwise(b, Arg(0), reduce(b, "sum", weighted, 1), dtype=BYTE)]


@register
@dataclass(frozen=True)
class MaskedMap(Op):
    """y_i = expr_i(a0, a1, …) at each element, as `map`; a0 is a mask that `pack_bits` made.

    Inputs: bits, uint8[elements / 8], and tensors that broadcast to the outputs' shape.

    Attributes:
        exprs: one scalar expression an output, as text; a0 is boolean.
    """

    name: ClassVar[str] = "masked_map"
    exprs: tuple[str, ...]

    @property
    def map(self) -> Map:
        """The same with truth values in place of bits."""
        return Map(self.exprs)

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """As the map's; the mask has a bit for each element."""
        bits, *others = inputs
        if not others:
            raise ShapeError("masked_map needs an input beside the mask")
        shape = broadcast_shapes(*(type.shape for type in others))
        if bits != TensorType(BYTE, (math.prod(shape) // 8,)) or math.prod(shape) % 8:
            raise ShapeError(f"the mask of {list(shape)} must be uint8 with a bit for each element, and is {bits}")
        return self.map.infer(self._types(inputs, shape))

    def indexing(self, inputs: Types, outputs: Types) -> Axes | None:
        """Ranges of elements that fill bytes of the mask."""
        y = outputs[0]
        if not y.size:
            return None
        found = in_c_order(y.shape, (y.size // 8, 8))
        (dims,), ((bits, bit),) = found.inputs, found.outputs
        given = [(bits,), *(broadcast_dims(dims, x.shape) for x in inputs[1:])]
        return Axes(given, [dims] * len(outputs), found.extents, found.whole | named([bit]))

    def _types(self, inputs: Types, shape: Shape) -> list[TensorType]:
        return [TensorType(BOOL, shape), *inputs[1:]]

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts."""
        return by_parts(self, b, inputs, cotangents)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """As the map's."""
        return self.map.overwrites(self._types(inputs, outputs[0].shape), outputs)

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Every input but the mask may have any strides."""
        return index > 0

    def flops(self, inputs: Types, outputs: Types) -> int:
        """As the map's; unpacking bits is no arithmetic."""
        return self.map.flops(self._types(inputs, outputs[0].shape), outputs)

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """As the map's, of one block."""
        return self.map.workspace(self._types(inputs, outputs[0].shape), outputs)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Block by block, each of elements that lie side by side in C order."""
        bits, shape = inputs[0], outputs[0].shape
        arrays = [*(np.broadcast_to(x, shape) for x in inputs[1:]), *outputs]
        for place, start, count in _runs(shape):
            parts = [array[place] for array in arrays]
            whole = np.unpackbits(bits[start // 8 : -(-(start + count) // 8)], bitorder="little")
            truth = whole[start % 8 : start % 8 + count].view(np.bool_).reshape(parts[0].shape)
            self.map.compute([truth, *parts[: len(inputs) - 1]], parts[len(inputs) - 1 :], workspace)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Bits unpacked to truth values, then a map."""
        bits, *others = inputs
        shape = broadcast_shapes(*(value.shape for value in others))
        columns = reshape(b, bits, (bits.type.size, 1))
        truth = elementwise(b, call("ne", call("bitand", Arg(0), Arg(1)), 0), columns, _powers(b))
        return b.node(self.map, reshape(b, truth, shape), *others)


def _powers(b: Builder) -> Value:
    array = np.array([1 << i for i in range(8)], np.uint8)
    return b.store(b.scope + "powers", TensorType(BYTE, (8,)), Kind.CONSTANT, Array(array))


def _runs(shape: Shape) -> Iterator[tuple[tuple[int | slice, ...], int, int]]:
    """(index, first element in C order, number of elements) of blocks of at most `BLOCK` elements, or of one row."""
    if not math.prod(shape):
        return
    cut, inner = len(shape) - 1, 1
    while cut > 0 and inner * shape[cut] <= BLOCK:
        inner *= shape[cut]
        cut -= 1
    rows = max(1, BLOCK // inner)
    for n, index in enumerate(np.ndindex(shape[:cut])):
        for row in range(0, shape[cut], rows):
            count = min(rows, shape[cut] - row)
            yield (*index, slice(row, row + count)), (n * shape[cut] + row) * inner, count * inner
