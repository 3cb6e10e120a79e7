"""ONNX Runtime's LSTM of quantised weights, com.microsoft.DynamicQuantizeLSTM.

Each product rounds its rows to 8 bits, by the range of all of them, and adds up integers. The rows of the inputs are
those of all steps; the state is rounded anew in each step, for the whole batch. (Of a batch, ONNX Runtime rounds the
part of each of its threads by itself, so its results depend on their number; these are those of one thread.)

Source: ONNX Runtime's ContribOperators.md, and dynamic_quantize_lstm.cc.
"""

from __future__ import annotations

import numpy as np

from foreplan.frontend.onnx.node import OnnxNode, Result, translates
from foreplan.frontend.onnx.ops.quantised import exact
from foreplan.frontend.onnx.ops.recurrent import activations, lengths, state
from foreplan.frontend.onnx.tensors import from_array
from foreplan.graph import Builder, Value
from foreplan.ops.expr import Expr, call, cast, clip, maximum, minimum, where
from foreplan.ops.map import elementwise
from foreplan.ops.marks import StraightThrough
from foreplan.ops.matmul import matmul
from foreplan.ops.recurrent import lstm
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape, slice_axis, transpose


class _Weights:
    """The weights of the inputs, or of the state: integers [D, K, 4·H], with a scale and a zero point.

    Attributes:
        real: the numbers that they stand for, [D, 4·H, K].
    """

    def __init__(self, n: OnnxNode, index: int, scale: int) -> None:
        ways, terms, columns = n.shape(index)
        self._dtype, self._scale = exact(terms), _of_columns(n, scale, ways, columns)
        zero = [_of_columns(n, scale + 1, ways, columns)] if n.has(scale + 1) else []

        def centred(w: Expr, *zero: Expr) -> Expr:
            number = cast(w, self._dtype)
            return number - cast(zero[0], self._dtype) if zero else number

        self._whole = elementwise(n.b, centred, n.value(index), *zero)
        scaled = elementwise(n.b, lambda w, s: cast(w, "float32") * s, self._whole, self._scale)
        self.real = transpose(n.b, scaled, (0, 2, 1))

    def times(self, b: Builder, rows: Value, way: int) -> Value:
        """The product with rows [M, K], rounded to integers."""
        axes = tuple(range(len(rows.shape)))
        low, high = (reduce(b, how, rows, axes) for how in ("min", "max"))
        # Zero is always among the numbers that rows may take.
        step = elementwise(b, _step, low, high)
        zero = elementwise(b, lambda low, s: clip(call("round", -minimum(low, 0.0) / s), 0.0, 255.0), low, step)
        whole = elementwise(
            b, lambda x, s, z: cast(clip(call("round", x / s) + z, 0.0, 255.0) - z, self._dtype), rows, step, zero
        )
        sums = matmul(b, whole, _one(b, self._whole, way))
        scale = _one(b, self._scale, way)
        return elementwise(b, lambda y, step, scale: cast(y, "float32") * (step * scale), sums, step, scale)


def _step(low: Expr, high: Expr) -> Expr:
    width = maximum(high, 0.0) - minimum(low, 0.0)
    return where(width > 0.0, width / 255.0, 1.0)


def _of_columns(n: OnnxNode, index: int, ways: int, columns: int) -> Value:
    """One number for each direction, or for each of its columns, beside [D, K, 4·H]."""
    if n.shape(index) not in ((ways,), (ways, 1), (ways, columns)):
        raise n.misshapen(
            f"{n.type(index)} must be a number for each of {ways} directions or of their {columns} columns"
        )
    return reshape(n.b, n.value(index), (ways, 1, -1))


def _one(b: Builder, value: Value, way: int) -> Value:
    return reshape(b, slice_axis(b, value, 0, way, 1), value.shape[1:])


@translates("DynamicQuantizeLSTM", domain="com.microsoft")
def _dynamic_lstm(n: OnnxNode) -> Result:
    x = n.value(0)
    if not len(x.shape) == len(n.shape(1)) == len(n.shape(2)) == 3:
        raise n.misshapen(f"{n.type(0)}, {n.type(1)} and {n.type(2)} must have three axes each")
    weights, valid = [_Weights(n, 1, 8), _Weights(n, 2, 10)], lengths(n)
    if valid is not None and x.shape[1] > 1:
        raise n.unsupported(
            "its items have several lengths, and round their states together while some have ended; give it one item, "
            "or one length"
        )
    if valid is not None:  # what stands behind the longest item has no part in the range
        numbers = n.as_value(from_array(f"{n.output_names[0]}.steps", np.arange(x.shape[0]).reshape(-1, 1, 1)))
        longest = reduce(n.b, "max", valid, (0,))
        x = elementwise(n.b, lambda x, t, most: where(t < cast(most, "int64"), x, 0.0), x, numbers, longest)

    def product(b: Builder, rows: Value, weight: Value, way: int, of_state: bool) -> Value:
        through = matmul(b, rows, weight, transpose_b=True)
        return b.apply(StraightThrough(), weights[of_state].times(b, rows, way), through)

    made = lstm(
        n.b,
        x,
        weights[0].real,
        weights[1].real,
        n.value(3) if n.has(3) else None,
        valid,
        state(n, 5),
        state(n, 6),
        n.value(7) if n.has(7) else None,
        input_forget=bool(n.integer("input_forget", 0)),
        product=product,
        direction=n.text("direction", "forward"),
        activations=activations(n),
        limit=n.number("clip") if n.has_attribute("clip") else None,
    )
    return [value if n.wants(i) else None for i, value in zip(range(n.output_count), made)]
