"""ONNX's recurrent layers."""

from __future__ import annotations

from foreplan.frontend.onnx.node import OnnxNode, Result, translates
from foreplan.frontend.onnx.tensors import Constant
from foreplan.graph import Value
from foreplan.ops.recurrent import Activation, Options, activation, gru, lstm, rnn
from foreplan.ops.shape import broadcast_to

# Activations with parameters; the attributes list values for these only.
_WITH_ALPHA = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
_WITH_BETA = {"affine", "scaledtanh", "hardsigmoid"}


def activations(n: OnnxNode) -> list[Activation] | None:
    """The activations that the node names; None: the usual ones."""
    names = n.strings("activations")
    if not names:
        return None
    alphas, betas = iter(n.numbers("activation_alpha", [])), iter(n.numbers("activation_beta", []))
    return [
        activation(
            name,
            next(alphas, None) if name.lower() in _WITH_ALPHA else None,
            next(betas, None) if name.lower() in _WITH_BETA else None,
        )
        for name in names
    ]


def lengths(n: OnnxNode) -> Value | None:
    """The number of valid steps of each item; None if all steps are valid, which most exporters write out."""
    if not n.has(4):
        return None
    steps = n.shape(0)[1 if n.integer("layout", 0) else 0]
    operand = n.operand(4)
    if isinstance(operand, Constant) and operand.array is not None and (operand.array == steps).all():
        return None
    return n.value(4)


def state(n: OnnxNode, index: int) -> Value | None:
    """An initial state; None if it is zero. A state for one item is repeated for a new batch."""
    if not n.has(index):
        return None
    operand = n.operand(index)
    if isinstance(operand, Constant) and (str(operand.init) == "fill(0.0)" or _is_zero(operand)):
        return None
    first, batch_first = n.value(index), bool(n.integer("layout", 0))
    axis, items = (0 if batch_first else 1), n.shape(0)[0 if batch_first else 1]
    if n.batch is not None and len(first.shape) == 3 and first.shape[axis] == 1 != items:
        shape = (*first.shape[:axis], items, *first.shape[axis + 1 :])
        n.batch.note_rewritten(n, first.shape, shape)
        return broadcast_to(n.b, first, shape)
    return first


def _is_zero(operand: Constant) -> bool:
    return operand.is_foldable and operand.array is not None and not operand.array.any()


@translates("RNN", "GRU", "LSTM")
def _recurrent(n: OnnxNode) -> Result:
    x, w, r = n.value(0), n.value(1), n.value(2)
    if len(x.shape) != 3 or len(w.shape) != 3 or len(r.shape) != 3:
        raise n.misshapen(f"{n.type(0)}, {n.type(1)} and {n.type(2)} must have three axes each")
    bias = n.value(3) if n.has(3) else None
    limit = n.number("clip") if n.has_attribute("clip") else None
    shared: Options = {"direction": n.text("direction", "forward"), "activations": activations(n)}
    shared |= {"limit": limit, "layout": n.integer("layout", 0)}
    valid, first = lengths(n), state(n, 5)
    if n.op_type == "RNN":
        made: tuple[Value, ...] = rnn(n.b, x, w, r, bias, valid, first, **shared)
    elif n.op_type == "GRU":
        linear = bool(n.integer("linear_before_reset", 0))
        made = gru(n.b, x, w, r, bias, valid, first, linear_before_reset=linear, **shared)
    else:
        peephole = n.value(7) if n.has(7) else None
        coupled = bool(n.integer("input_forget", 0))
        made = lstm(n.b, x, w, r, bias, valid, first, state(n, 6), peephole, input_forget=coupled, **shared)
    return [value if n.wants(i) else None for i, value in zip(range(n.output_count), made)]
