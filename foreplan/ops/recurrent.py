"""Recurrent layers with ONNX's semantics (RNN, GRU, LSTM): a loop of products and maps for each direction.

The products with the inputs of all steps are one product; a step adds the product with the state and applies its gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict, Unpack

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import Array, Builder, Kind, Value
from foreplan.graph.types import Shape
from foreplan.ops.cell import repeated
from foreplan.ops.expr import Arg, Expr, call, clip, exp, maximum, minimum, relu, sigmoid, tanh, where
from foreplan.ops.join import concat
from foreplan.ops.map import elementwise, elementwise_many
from foreplan.ops.matmul import matmul
from foreplan.ops.shape import reshape, slice_axis, transpose
from foreplan.ops.unstack import MOST_STEPS, zeros

Activation = Callable[[Expr], Expr]

# name → a function of (alpha, beta), None if not given, that returns the activation
_ACTIVATIONS: dict[str, Callable[[float | None, float | None], Activation]] = {
    "relu": lambda a, b: relu,
    "tanh": lambda a, b: tanh,
    "sigmoid": lambda a, b: sigmoid,
    "affine": lambda a, b: lambda x: x * _or(a, 1.0) + _or(b, 0.0),
    "leakyrelu": lambda a, b: lambda x: where(x < 0.0, x * _or(a, 0.01), x),
    "thresholdedrelu": lambda a, b: lambda x: where(x > _or(a, 1.0), x, 0.0),
    "scaledtanh": lambda a, b: lambda x: tanh(x * _or(b, 1.0)) * _or(a, 1.0),
    "hardsigmoid": lambda a, b: lambda x: maximum(minimum(x * _or(a, 0.2) + _or(b, 0.5), 1.0), 0.0),
    "elu": lambda a, b: lambda x: where(x < 0.0, (exp(x) - 1.0) * _or(a, 1.0), x),
    "softsign": lambda a, b: lambda x: x / (call("abs", x) + 1.0),
    "softplus": lambda a, b: lambda x: maximum(x, 0.0) + call("log1p", exp(-call("abs", x))),
}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def activation(name: str, alpha: float | None = None, beta: float | None = None) -> Activation:
    """An activation by ONNX's name for it, in any case, with its parameters or their defaults.

    Raises:
        UnsupportedError: there is none of that name.
    """
    if name.lower() not in _ACTIVATIONS:
        raise UnsupportedError(f"there is no recurrent activation {name!r}; there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name.lower()](alpha, beta)


# (builder, rows [M, K], one direction's weight [G·H, K], the direction, whether the rows are the state) → [M, G·H]
Product = Callable[[Builder, Value, Value, int, bool], Value]


def _usual(b: Builder, rows: Value, weight: Value, way: int, of_state: bool) -> Value:
    return matmul(b, rows, weight, transpose_b=True)


LSTM_ORDER, GRU_ORDER = "iofc", "zrh"  # ONNX's order of the gates; c and h are the candidates


@dataclass(frozen=True)
class _Layer:
    """The inputs of all three kinds of layer.

    Attributes:
        x: inputs [T, N, I].
        w: weights of the inputs [D, G·H, I].
        r: weights of the state [D, G·H, H].
        bias: of both [D, 2·G·H], or None.
        lengths: int [N], valid steps of each item, or None for all T.
        states: initial states, each [D, N, H] or None.
        direction: forward, reverse or bidirectional.
        activations: for one direction after the other.
        limit: gates are clipped to ±limit before their activation, or None.
        gates: how many there are.
        extra: further weights, with the direction first.
        product: of rows with a weight.
    """

    x: Value
    w: Value
    r: Value
    bias: Value | None
    lengths: Value | None
    states: tuple[Value | None, ...]
    direction: str
    activations: Sequence[Activation]
    limit: float | None
    gates: int
    extra: tuple[Value | None, ...]
    product: Product = _usual

    def check(self) -> None:
        """Raise unless the shapes fit each other."""
        ways = {"forward": 1, "reverse": 1, "bidirectional": 2}.get(self.direction)
        if ways is None:
            raise ShapeError(f"the direction must be forward, reverse or bidirectional, and is {self.direction!r}")
        if self.x.shape[0] > MOST_STEPS:
            raise ShapeError(f"{self.x!r} has {self.x.shape[0]} steps, and {MOST_STEPS} are the most: use fewer steps")
        hidden = self.r.shape[-1]
        rows = self.gates * hidden
        checked: list[tuple[str, Value | None, Shape]] = [
            ("w", self.w, (ways, rows, self.x.shape[-1])),
            ("r", self.r, (ways, rows, hidden)),
            ("bias", self.bias, (ways, 2 * rows)),
            ("lengths", self.lengths, (self.x.shape[1],)),
            *((f"initial state {i}", x, (ways, self.x.shape[1], hidden)) for i, x in enumerate(self.states)),
        ]
        for name, value, shape in checked:
            if value is not None and value.shape != shape:
                raise ShapeError(f"the {name} of a recurrent layer must have the shape {list(shape)}, and is {value!r}")

    def gate(self, x: Expr) -> Expr:
        """The input of a gate's activation."""
        return x if self.limit is None else clip(x, -self.limit, self.limit)


@dataclass(frozen=True)
class _Way:
    """One direction of a layer.

    Attributes:
        index: of the direction.
        r: [G·H, H].
        bias: of the state [G·H], or None.
        sums: what each step's input adds to the gates, with its bias, [T, N, G·H].
        states: initial ones, [N, H] each.
        backward: whether the last step comes first.
    """

    index: int
    r: Value
    bias: Value | None
    sums: Value
    states: list[Value]
    extra: list[Value | None]
    activations: Sequence[Activation]
    backward: bool


Step = Callable[[Builder, _Layer, _Way, Value, list[Value]], list[Value]]


def _pick(b: Builder, value: Value | None, way: int) -> Value | None:
    """One direction of a [D, …] tensor."""
    return None if value is None else reshape(b, slice_axis(b, value, 0, way, 1), value.shape[1:])


def _ways(b: Builder, layer: _Layer) -> list[_Way]:
    steps, items, hidden = layer.x.shape[0], layer.x.shape[1], layer.r.shape[-1]
    rows = layer.gates * hidden
    flat = reshape(b, layer.x, (steps * items, layer.x.shape[2]))
    found = []
    for way in range(layer.w.shape[0]):
        w, r, bias = (_pick(b, value, way) for value in (layer.w, layer.r, layer.bias))
        assert w is not None and r is not None
        made = layer.product(b, flat, w, way, False)
        sums = _sum(b, made, None if bias is None else slice_axis(b, bias, 0, 0, rows))
        states = []
        for state in layer.states:
            first = _pick(b, state, way)
            if first is None:
                first = zeros(b, layer.x.dtype, (items, hidden))
            states.append(first)
        count = len(layer.activations) // layer.w.shape[0]
        found.append(
            _Way(
                way,
                r,
                None if bias is None else slice_axis(b, bias, 0, rows, rows),
                reshape(b, sums, (steps, items, rows)),
                states,
                [_pick(b, value, way) for value in layer.extra],
                layer.activations[way * count : (way + 1) * count],
                layer.direction == "reverse" or way == 1,
            )
        )
    return found


def _layer(b: Builder, layer: _Layer, step: Step) -> list[Value]:
    """[Y, final states…]: Y [T, D, N, H], states [D, N, H]."""
    layer.check()
    steps, items, hidden = layer.x.shape[0], layer.x.shape[1], layer.r.shape[-1]
    found = [_way(b, layer, way, step) for way in _ways(b, layer)]
    y = concat(b, [reshape(b, y, (steps, 1, items, hidden)) for _, y in found], 1)
    states = zip(*(states for states, _ in found))
    return [y, *(concat(b, [reshape(b, one, (1, items, hidden)) for one in state], 0) for state in states)]


def _way(b: Builder, layer: _Layer, way: _Way, step: Step) -> tuple[list[Value], Value]:
    """The final states [N, H] of one direction, and its outputs [T, N, H]."""
    steps, items = layer.x.shape[0], layer.x.shape[1]
    stacks, lengths = [way.sums], None
    if layer.lengths is not None:
        lengths = reshape(b, layer.lengths, (items, 1))
        numbers = np.arange(steps, dtype=lengths.dtype.numpy)
        stacks.append(b.store("step_numbers", lengths.type.with_shape((steps,)), Kind.CONSTANT, Array(numbers)))

    def one(states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        new = step(b, layer, way, slices[0], states)
        y = new[0]
        if lengths is not None:  # items that have ended keep their state and show zeros
            new = [
                elementwise(b, lambda n, t, s, o: where(n > t, s, o), lengths, slices[1], s, o)
                for s, o in zip(new, states)
            ]
            y = elementwise(b, lambda n, t, y: where(n > t, y, 0.0), lengths, slices[1], y)
        return new, [y]

    states, (y,) = repeated(b, one, way.states, stacks, way.backward)
    return states, y


def _gates(b: Builder, sums: Value, count: int) -> list[Value]:
    """[N, G·H] cut into G windows [N, H]."""
    hidden = sums.shape[1] // count
    return [slice_axis(b, sums, 1, i * hidden, hidden) for i in range(count)]


def _sum(b: Builder, *values: Value | None) -> Value:
    """The sum of the given values, in one map."""
    there = [value for value in values if value is not None]
    total: Expr = Arg(0)
    for i in range(1, len(there)):
        total = total + Arg(i)
    return elementwise(b, total, *there)


def _rnn_step(b: Builder, layer: _Layer, way: _Way, sums: Value, states: list[Value]) -> list[Value]:
    (h,) = states
    (f,) = way.activations
    s = _sum(b, sums, matmul(b, h, way.r, transpose_b=True), way.bias)
    return [elementwise(b, lambda s: f(layer.gate(s)), s)]


def _lstm_step(
    b: Builder, layer: _Layer, way: _Way, sums: Value, states: list[Value], coupled: bool, order: str
) -> list[Value]:
    h, c = states
    f, g, show = way.activations
    s = _sum(b, sums, layer.product(b, h, way.r, way.index, True), way.bias)
    hidden = h.shape[1]
    # Peepholes: weights of the cell in the gates i, o and f, in this order.
    (peephole,) = way.extra
    peeps = [slice_axis(b, peephole, 0, i * hidden, hidden) for i in range(3)] if peephole is not None else []
    gate = dict(zip(order, _gates(b, s, 4)))
    values = [*(gate[letter] for letter in LSTM_ORDER), c, *peeps]
    i, o, forget, candidate, cell, *peep = map(Arg, range(len(values)))
    into = i + peep[0] * cell if peep else i
    kept = forget + peep[2] * cell if peep else forget
    enter = f(layer.gate(into))
    keep = 1.0 - enter if coupled else f(layer.gate(kept))
    new = keep * cell + enter * g(layer.gate(candidate))
    out = f(layer.gate(o + peep[1] * new if peep else o)) * show(new)
    made = elementwise_many(b, [out, new], *values)
    return list(made)


def _gru_step(
    b: Builder, layer: _Layer, way: _Way, sums: Value, states: list[Value], linear: bool, order: str
) -> list[Value]:
    step = _reset_behind if linear else _reset_before
    return [step(b, layer, way, sums, states[0], order)]


def _blend(layer: _Layer, way: _Way, z: Expr, candidate: Expr, h: Expr) -> Expr:
    """The next state of a GRU, from what its update gate and its candidate are activated of."""
    f, g = way.activations
    update = f(layer.gate(z))
    return (1.0 - update) * g(layer.gate(candidate)) + update * h


def _reset_behind(b: Builder, layer: _Layer, way: _Way, sums: Value, h: Value, order: str) -> Value:
    """A GRU's step whose reset gate applies to the product with the state: one product for all gates."""
    f, _ = way.activations
    through = _sum(b, matmul(b, h, way.r, transpose_b=True), way.bias)
    inputs, states = (dict(zip((*order[:2], "h"), _gates(b, x, 3))) for x in (sums, through))

    def new(z: Expr, z_h: Expr, r: Expr, r_h: Expr, x: Expr, x_h: Expr, h: Expr) -> Expr:
        return _blend(layer, way, z + z_h, x + f(layer.gate(r + r_h)) * x_h, h)

    return elementwise(b, new, *(each[gate] for gate in "zrh" for each in (inputs, states)), h)


def _reset_before(b: Builder, layer: _Layer, way: _Way, sums: Value, h: Value, order: str) -> Value:
    """A GRU's step whose reset gate applies to the state that the candidate's product reads."""
    f, _ = way.activations
    hidden = h.shape[1]
    early, late = 2 * hidden, hidden  # rows of the gates, and of the candidate
    parts = (0, early), (early, late)
    biases = [None if way.bias is None else slice_axis(b, way.bias, 0, *part) for part in parts]
    gates = _sum(
        b,
        slice_axis(b, sums, 1, 0, early),
        matmul(b, h, slice_axis(b, way.r, 0, 0, early), transpose_b=True),
        biases[0],
    )
    gate = dict(zip(order, _gates(b, gates, 2)))
    reset = elementwise(b, lambda r, h: f(layer.gate(r)) * h, gate["r"], h)
    through = _sum(b, matmul(b, reset, slice_axis(b, way.r, 0, early, late), transpose_b=True), biases[1])

    def new(z: Expr, x: Expr, t: Expr, h: Expr) -> Expr:
        return _blend(layer, way, z, x + t, h)

    return elementwise(b, new, gate["z"], slice_axis(b, sums, 1, early, late), through, h)


class Options(TypedDict, total=False):
    """The options of all three kinds of layer.

    Attributes:
        direction: forward, reverse or bidirectional; forward by default.
        activations: of one direction after the other; the layer's own by default.
        limit: inputs of activations are clipped to ±limit; not by default.
        layout: 1 for the batch first; 0 by default.
    """

    direction: str
    activations: Sequence[Activation] | None
    limit: float | None
    layout: int


def rnn(
    b: Builder,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
    **options: Unpack[Options],
) -> tuple[Value, Value]:
    """ONNX's RNN: h ← f(x·wᵀ + h·rᵀ + biases).

    Args:
        b: where nodes are added.
        x: [T, N, I], or [N, T, I] with layout 1.
        w: [D, H, I], D = 2 if bidirectional, else 1.
        r: [D, H, H].
        bias: [D, 2·H]: of w, then of r.
        lengths: int [N], valid steps of each item; later ones show zeros and leave the state alone.
        initial_h: [D, N, H] (layout 1: [N, D, H]); zeros if None.
        options: see `Options`; f is tanh by default.

    Returns:
        Y [T, D, N, H] and the final state [D, N, H] (layout 1: [N, T, D, H] and [N, D, H]).

    Raises:
        ShapeError: the shapes do not fit each other.
    """
    y, h = _recurrent(b, _rnn_step, 1, [tanh], x, w, r, bias, lengths, (initial_h,), **options)
    return y, h


def lstm(
    b: Builder,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
    initial_c: Value | None = None,
    peephole: Value | None = None,
    *,
    input_forget: bool = False,
    order: str = LSTM_ORDER,
    product: Product = _usual,
    **options: Unpack[Options],
) -> tuple[Value, Value, Value]:
    """ONNX's LSTM (Hochreiter and Schmidhuber 1997, with peepholes). Gates i, o, f, c stand along axis 1 of w
    [D, 4·H, I], r [D, 4·H, H] and bias [D, 8·H], in this order or that of the letters in `order`; peephole [D, 3·H] is
    for i, o, f; `input_forget` makes f = 1 − i; activations f, g, h a direction (sigmoid, tanh, tanh). `product` is
    another product with w and r, such as that of rounded numbers. The rest as `rnn`; returns Y, the final state and the
    final cell.
    """
    step = partial(_lstm_step, coupled=input_forget, order=order)
    usual, states = [sigmoid, tanh, tanh], (initial_h, initial_c)
    y, h, c = _recurrent(b, step, 4, usual, x, w, r, bias, lengths, states, (peephole,), product, **options)
    return y, h, c


def gru(
    b: Builder,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
    *,
    linear_before_reset: bool = False,
    order: str = GRU_ORDER,
    **options: Unpack[Options],
) -> tuple[Value, Value]:
    """ONNX's GRU (Cho et al. 2014). Gates z, r, h stand along axis 1 of w [D, 3·H, I], r [D, 3·H, H] and bias
    [D, 6·H], in this order or that of the letters in `order`, h last; activations f, g a direction (sigmoid, tanh).
    With `linear_before_reset` the reset gate applies behind the product with the state, else before. The rest as `rnn`.
    """
    step = partial(_gru_step, linear=linear_before_reset, order=order)
    y, h = _recurrent(b, step, 3, [sigmoid, tanh], x, w, r, bias, lengths, (initial_h,), **options)
    return y, h


def _recurrent(
    b: Builder,
    step: Step,
    gates: int,
    usual: Sequence[Activation],
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None,
    lengths: Value | None,
    states: tuple[Value | None, ...],
    extra: tuple[Value | None, ...] = (),
    product: Product = _usual,
    *,
    direction: str = "forward",
    activations: Sequence[Activation] | None = None,
    limit: float | None = None,
    layout: int = 0,
) -> list[Value]:
    """[Y, final states…] of a layer; x, initial states and results have the batch first if the layout is 1."""
    chosen = activations or [*usual] * w.shape[0]
    layer = _Layer(x, w, r, bias, lengths, states, direction, chosen, limit, gates, extra, product)
    if layout == 0:
        return _layer(b, layer, step)
    turned = tuple(None if state is None else transpose(b, state, (1, 0, 2)) for state in states)
    y, *last = _layer(b, replace(layer, x=transpose(b, x, (1, 0, 2)), states=turned), step)
    return [transpose(b, y, (2, 0, 1, 3)), *(transpose(b, state, (1, 0, 2)) for state in last)]
