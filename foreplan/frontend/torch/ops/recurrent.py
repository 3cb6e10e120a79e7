"""Recurrent layers and cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.reductions import dtype_of_first
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.graph import Value
from foreplan.ops import recurrent
from foreplan.ops.expr import relu, sigmoid, tanh


def _initial(c: Call, states: Sequence[Any]) -> list[Tensor | None]:
    """Initial states; zeros that are known are none."""
    return [None if isinstance(each, np.ndarray) and not each.any() else c.tensor(each) for each in states]


def _layers(
    c: Call,
    kind: str,
    x: Any,
    states: Sequence[Any],
    weights: Sequence[Any],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool = False,
) -> list[Any]:
    dtype = dtype_of_first(c)
    y: Any = convert(c.tensor(x), dtype)
    y = y.transpose(1, 0, 2) if batch_first else y
    ways, finals, first = 2 if both_ways else 1, [], _initial(c, states)
    # Weights and biases of each layer and direction; and the projection of states, if there is one.
    each = len(weights) // (layers * ways)
    if each != (4 if bias else 2):
        raise UnsupportedError("an LSTM with proj_size")
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            at = layer * ways + way
            w, r, *both = (convert(c.tensor(each_), dtype) for each_ in weights[at * each : (at + 1) * each])
            joined: Any = np.concatenate(both) if both else None
            added = joined.reshape(1, -1).value if both else None
            own = [None if h is None else convert(h[at : at + 1], dtype).value for h in first]
            found = _cell(c, kind, y.value, _lead(w), _lead(r), added, own, "reverse" if way else "forward")
            steps, *last = (c.wrap(value) for value in found)
            outputs.append(steps.reshape(steps.shape[0], steps.shape[2], steps.shape[3]))
            finals.append(last)
        y = np.concatenate(outputs, axis=2) if ways > 1 else outputs[0]
        if dropout and training and layer < layers - 1:
            y = nn.dropout(y, dropout)
    ends = [np.concatenate(list(group), axis=0) if len(finals) > 1 else group[0] for group in zip(*finals)]
    return [y.transpose(1, 0, 2) if batch_first else y, *ends]


def _lead(x: Tensor) -> Value:
    return x.reshape(1, *x.shape).value


def _cell(
    c: Call, kind: str, x: Value, w: Value, r: Value, bias: Value | None, states: Sequence[Value | None], way: str
) -> tuple[Value, ...]:
    if kind == "lstm":
        return recurrent.lstm(c.b, x, w, r, bias, None, *states, order="ifco", direction=way)
    if kind == "gru":
        return recurrent.gru(c.b, x, w, r, bias, None, *states, order="rzh", linear_before_reset=True, direction=way)
    f = relu if kind == "rnn_relu" else tanh
    return recurrent.rnn(c.b, x, w, r, bias, None, *states, direction=way, activations=[f])


@aten("lstm", draws=True)
def _lstm(c: Call, x: Any, states: Any, weights: Any, *options: Any) -> list[Any]:
    if not isinstance(states, list | tuple):
        raise UnsupportedError("an LSTM of a packed sequence, whose lengths are data; give padded steps and a mask")
    return _layers(c, "lstm", x, states, weights, *options)


@aten("gru", "rnn_tanh", "rnn_relu", draws=True)
def _gru(c: Call, x: Any, state: Any, weights: Any, *options: Any) -> list[Any]:
    if isinstance(weights, Tensor | np.ndarray):
        raise UnsupportedError("a layer of a packed sequence, whose lengths are data; give padded steps and a mask")
    return _layers(c, c.name, x, [state], weights, *options)


def _sums(c: Call, x: Any, weight: Any, bias: Any) -> Any:
    y = c.tensor(x) @ c.tensor(weight).mT
    return y if bias is None else y + c.tensor(bias)


@aten("lstm_cell")
def _lstm_cell(c: Call, x: Any, states: Sequence[Any], wi: Any, wh: Any, bi: Any = None, bh: Any = None) -> list[Any]:
    sums = _sums(c, x, wi, bi) + _sums(c, states[0], wh, bh)
    gates: Any = np.split(sums, 4, axis=-1)

    def memory(i: Any, f: Any, g: Any, before: Any) -> Any:
        return sigmoid(f) * before + sigmoid(i) * tanh(g)

    cell = apply("cell", memory, *gates[:3], c.tensor(states[1]))
    return [apply("hidden", lambda o, m: sigmoid(o) * tanh(m), gates[3], cell), cell]


@aten("gru_cell")
def _gru_cell(c: Call, x: Any, state: Any, wi: Any, wh: Any, bi: Any = None, bh: Any = None) -> Any:
    ours: Any = np.split(_sums(c, x, wi, bi), 3, axis=-1)
    theirs: Any = np.split(_sums(c, state, wh, bh), 3, axis=-1)

    def new(r: Any, z: Any, n: Any, r2: Any, z2: Any, n2: Any, h: Any) -> Any:
        kept = sigmoid(z + z2)
        return (1.0 - kept) * tanh(n + sigmoid(r + r2) * n2) + kept * h

    return apply("gru_cell", new, *ours, *theirs, c.tensor(state))


@aten("rnn_tanh_cell", "rnn_relu_cell")
def _rnn_cell(c: Call, x: Any, state: Any, wi: Any, wh: Any, bi: Any = None, bh: Any = None) -> Any:
    sums = _sums(c, x, wi, bi) + _sums(c, state, wh, bh)
    return nn.tanh(sums) if c.name == "rnn_tanh_cell" else nn.relu(sums)
