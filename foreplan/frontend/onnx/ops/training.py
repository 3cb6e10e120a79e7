"""Ops of ONNX's domain ai.onnx.preview.training: gradients and optimizers' updates as nodes of a model.

Source: ONNX's Operators.md, whose tests these pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from foreplan.frontend.onnx.node import OnnxNode, Result, translates
from foreplan.graph import Value
from foreplan.ops.expr import Arg, Expr, call, cast, sqrt, where
from foreplan.ops.map import elementwise_many
from foreplan.ops.marks import Gradient
from foreplan.ops.reduce import reduce

_translates = partial(translates, domain="ai.onnx.preview.training")
Update = Callable[[Expr, Expr, Expr, Expr, Sequence[Expr]], Sequence[Expr]]


@_translates("Gradient")
def _gradient(n: OnnxNode) -> Result:
    """That of y, the last input here (see `order.named_reads`), where the inputs are the tensors named by xs."""
    *given, y = n.inputs
    xs = n.strings("xs")
    if [*xs, *n.strings("zs")] != list(n.proto.input):
        raise n.unsupported("it asks for a gradient at other tensors than those that y was computed from")
    if not all(isinstance(each, Value) for each in (y, *given)):
        raise n.unsupported("what it differentiates was computed at import, from constants")
    number = n.value(len(given))
    if number.shape:
        number = reduce(n.b, "sum", number)
    return n.b.node(Gradient(), number, *n.values()[: len(xs)])


@_translates("Adagrad")
def _adagrad(n: OnnxNode) -> Result:
    decay, epsilon, norm = n.number("decay_factor", 0.0), n.number("epsilon", 1e-6), n.number("norm_coefficient", 0.0)

    def update(rate: Expr, steps: Expr, x: Expr, gradient: Expr, kept: Sequence[Expr]) -> Sequence[Expr]:
        slope = norm * x + gradient
        squares = kept[0] + slope * slope
        return x - rate / (1.0 + steps * decay) * slope / (sqrt(squares) + epsilon), squares

    return _updated(n, 1, update)


@_translates("Adam")
def _adam(n: OnnxNode) -> Result:
    alpha, beta, epsilon = n.number("alpha", 0.9), n.number("beta", 0.999), n.number("epsilon", 1e-6)
    norm, after = n.number("norm_coefficient", 0.0), n.number("norm_coefficient_post", 0.0)

    def update(rate: Expr, steps: Expr, x: Expr, gradient: Expr, kept: Sequence[Expr]) -> Sequence[Expr]:
        slope = norm * x + gradient
        mean = alpha * kept[0] + (1 - alpha) * slope
        squares = beta * kept[1] + (1 - beta) * slope * slope
        corrected = rate * sqrt(1.0 - call("pow", beta, steps)) / (1.0 - call("pow", alpha, steps))
        new = x - where(steps > 0.0, corrected, rate) * mean / (sqrt(squares) + epsilon)
        return (1.0 - after) * new, mean, squares

    return _updated(n, 2, update)


@_translates("Momentum")
def _momentum(n: OnnxNode) -> Result:
    alpha, beta, norm, mode = n.number("alpha"), n.number("beta"), n.number("norm_coefficient"), n.text("mode")
    if mode not in ("standard", "nesterov"):
        raise n.fail(f"its mode must be standard or nesterov, and is {mode!r}")

    def update(rate: Expr, steps: Expr, x: Expr, gradient: Expr, kept: Sequence[Expr]) -> Sequence[Expr]:
        slope = norm * x + gradient
        speed = alpha * kept[0] + where(steps > 0.0, beta, 1.0) * slope
        return x - rate * (slope + alpha * speed if mode == "nesterov" else speed), speed

    return _updated(n, 1, update)


def _updated(n: OnnxNode, states: int, update: Update) -> Result:
    """The results of an update of each tensor: all new tensors, then all that is kept of the first kind, and so on.

    Inputs: the learning rate, the number of updates before, then tensors, gradients, and each kind of what is kept.
    """
    rate, steps, *rest = n.values()
    count, left = divmod(len(rest), 2 + states)
    if left or not count:
        raise n.fail(f"it has {len(rest)} tensors, gradients and states, which are {2 + states} for each tensor")
    found = []
    for i in range(count):
        x, *others = rest[i::count]
        asked = cast(Arg(0), x.dtype), cast(Arg(1), x.dtype)
        exprs = update(*asked, Arg(2), Arg(3), [Arg(4 + k) for k in range(states)])
        found.append(elementwise_many(n.b, exprs, rate, steps, x, *others))
    return [tensors[k] for k in range(1 + states) for tensors in found]
