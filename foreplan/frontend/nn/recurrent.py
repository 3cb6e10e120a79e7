"""Recurrent layers, with PyTorch's parameters: several layers deep, in one direction or both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from foreplan.base.arguments import choice, flag, shown, whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.nn.functions import dropout as drop
from foreplan.frontend.nn.parameters import float_dtype, layer, parameter
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, takes_tensors, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.graph import Builder, Uniform, Value
from foreplan.ops import recurrent
from foreplan.ops.expr import relu, tanh
from foreplan.ops.join import concat
from foreplan.ops.shape import reshape, transpose

# (builder, x [T, N, I], w, r, bias or None, initial states, direction) → Y and the final states, all with one direction
_MOST_LAYERS, _MOST_FEATURES = 1000, 1 << 24
_Cell = Callable[..., tuple[Value, ...]]


@takes_tensors
def rnn(
    x: Tensor,
    features: int,
    layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = True,
    bias: bool = True,
    dropout: float = 0.0,
    state: Any = None,
    activation: str = "tanh",
    name: str = "",
) -> tuple[Tensor, Tensor]:
    """Elman's recurrent layer: h ← f(W_ih·x + b_ih + W_hh·h + b_hh).

    Layer l has `weight_ih_l<l>` [features, inputs], `weight_hh_l<l>` [features, features], `bias_ih_l<l>` and
    `bias_hh_l<l>` [features]; those of the other direction end in `_reverse`. All are drawn from U(±1/√features). These
    are the names, shapes and initial values of `torch.nn.RNN`. The steps of a layer are one loop (see `foreplan.scan`).

    Args:
        x: [N, T, inputs].
        features: width H of the state.
        layers: number L of layers, each of which reads the outputs of the one before.
        bidirectional: every layer also runs from the last step to the first; D is 2 then, else 1.
        batch_first: whether `x` and the outputs are [N, T, …] or, as PyTorch has it by default, [T, N, …].
        bias: whether there are biases.
        dropout: share of the outputs of each layer but the last that is zeroed in training.
        state: the initial state [L·D, N, H], layer by layer; zeros by default.
        activation: f, "tanh" or "relu".
        name: of the layer.

    Returns:
        The outputs of the last layer [N, T, D·H], and the final state [L·D, N, H].

    Raises:
        ShapeError: `x` does not have three axes, or the state another shape.
        UsageError: a number is not whole or too small, or there is no such activation.
        TraceError: the dropout is no number in [0, 1).
    """
    f = {"tanh": tanh, "relu": relu}[choice("activation", activation, ("tanh", "relu"))]

    def cell(b: Builder, x: Value, w: Value, r: Value, bias: Value | None, states: Any, way: str) -> tuple[Value, ...]:
        return recurrent.rnn(b, x, w, r, bias, None, *states, direction=way, activations=[f])

    with layer(name, "rnn"):
        y, (h,) = _stack(cell, 1, (state,), x, features, layers, bidirectional, batch_first, bias, dropout)
        return y, h


@takes_tensors
def lstm(
    x: Tensor,
    features: int,
    layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = True,
    bias: bool = True,
    dropout: float = 0.0,
    state: tuple[Any, Any] | None = None,
    name: str = "",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Long short-term memory (Hochreiter and Schmidhuber 1997) with the parameters of `torch.nn.LSTM`.

    Weights have 4·H rows, for the gates i, f, g, o in this order. `state` and the second result are pairs (h, c), each
    [L·D, N, H]. The rest is as in `rnn`.
    """

    def cell(b: Builder, x: Value, w: Value, r: Value, bias: Value | None, states: Any, way: str) -> tuple[Value, ...]:
        return recurrent.lstm(b, x, w, r, bias, None, *states, order="ifco", direction=way)

    if state is not None and not (isinstance(state, tuple | list) and len(state) == 2):
        raise ShapeError(f"lstm's state is a pair (h, c), and is {shown(state)}")
    given = (None, None) if state is None else tuple(state)
    with layer(name, "lstm"):
        y, (h, c) = _stack(cell, 4, given, x, features, layers, bidirectional, batch_first, bias, dropout)
        return y, (h, c)


@takes_tensors
def gru(
    x: Tensor,
    features: int,
    layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = True,
    bias: bool = True,
    dropout: float = 0.0,
    state: Any = None,
    name: str = "",
) -> tuple[Tensor, Tensor]:
    """Gated recurrent unit (Cho et al. 2014) with the parameters of `torch.nn.GRU`.

    Weights have 3·H rows, for the gates r, z, n in this order. The reset gate applies behind the product with the
    state, as in PyTorch. The rest is as in `rnn`.
    """

    def cell(b: Builder, x: Value, w: Value, r: Value, bias: Value | None, states: Any, way: str) -> tuple[Value, ...]:
        return recurrent.gru(b, x, w, r, bias, None, *states, order="rzh", linear_before_reset=True, direction=way)

    with layer(name, "gru"):
        y, (h,) = _stack(cell, 3, (state,), x, features, layers, bidirectional, batch_first, bias, dropout)
        return y, h


def _stack(
    cell: _Cell,
    gates: int,
    states: tuple[Any, ...],
    x: Tensor,
    features: int,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
    bias: bool,
    dropout: float,
) -> tuple[Tensor, list[Tensor]]:
    """Outputs and final states of layers, one upon the other."""
    if x.ndim != 3:
        raise ShapeError(f"a recurrent layer needs [batch, steps, inputs], and got {x!r}")
    features = whole("the number of features", features, 1, _MOST_FEATURES)
    layers = whole("the number of layers", layers, 1, _MOST_LAYERS)
    ways = 2 if flag("bidirectional", bidirectional) else 1
    y = x.transpose(1, 0, 2) if flag("batch_first", batch_first) else x
    y = convert(y, float_dtype(x))
    first = [_initial(state, (layers * ways, y.shape[1], features), y) for state in states]
    finals: list[tuple[Value, ...]] = []
    for i in range(layers):
        if i:
            y = drop(y, dropout)
        outputs, b = [], current().at()
        for way in range(ways):
            weights = _weights(f"l{i}" + "_reverse" * way, y, gates, features, flag("bias", bias))
            own = [None if s is None else s[i * ways + way : i * ways + way + 1].value for s in first]
            steps, *last = cell(b, y.value, *weights, own, "reverse" if way else "forward")
            outputs.append(reshape(b, steps, (y.shape[0], y.shape[1], features)))
            finals.append(tuple(last))
        y = wrap(concat(b, outputs, 2))
    b = current().at()
    final = [wrap(concat(b, list(each), 0)) for each in zip(*finals)]
    return wrap(transpose(b, y.value, (1, 0, 2))) if batch_first else y, final


def _initial(state: Any, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    if state is None:
        return None
    found = convert(as_tensor(state, like.value.dtype), like.dtype)
    if found.shape != shape:
        raise ShapeError(
            f"the initial state of these recurrent layers must have the shape {list(shape)} (layers and directions, "
            f"batch, features), and is {found!r}"
        )
    return found


def _weights(suffix: str, x: Tensor, gates: int, features: int, bias: bool) -> tuple[Value, Value, Value | None]:
    """Weights [1, G·H, I] and [1, G·H, H] and biases [1, 2·G·H] of one layer in one direction."""
    bound, rows, dtype = 1.0 / math.sqrt(features), gates * features, float_dtype(x)

    def drawn(kind: str, *shape: int) -> Tensor:
        return parameter(f"{kind}_{suffix}", shape, Uniform(-bound, bound), dtype)

    w, r = drawn("weight_ih", rows, x.shape[2]), drawn("weight_hh", rows, features)
    both: Any = [drawn("bias_ih", rows), drawn("bias_hh", rows)] if bias else []
    joined = as_tensor(np.concatenate(both).reshape(1, -1)).value if both else None
    return w.reshape(1, *w.shape).value, r.reshape(1, *r.shape).value, joined
