"""Element-wise ONNX ops: one table of expressions, and the few that need attributes or types."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce

from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.frontend.onnx.tensors import dtype_of
from foreplan.graph import as_dtype
from foreplan.ops.expr import Expr, Scalar, call, cast, clip, erf, exp, sigmoid, tanh, where
from foreplan.ops.map import convert
from foreplan.ops.shape import broadcast_to, reshape
from foreplan.ops.storage import ROUNDINGS, bitcast, decoded, encoded


def _softplus(x: Expr) -> Expr:
    return call("max", x, 0.0) + call("log1p", exp(-call("abs", x)))


def _expm1_below_zero(x: Expr) -> Expr:
    """exp(x) - 1 for negative x, and 0 elsewhere, where exp could overflow."""
    return call("expm1", where(x > 0, 0.0, x))


# In lower case these are names of scalar functions.
_SAME_NAME = (
    *("Abs", "Neg", "Sign", "Floor", "Ceil", "Round", "Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos", "Tan", "Asin"),
    *("Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh", "Sigmoid", "Relu", "Erf", "IsNaN", "Not"),
)

UNARY: dict[str, Callable[[Expr], Expr]] = {
    **{name: partial(call, name.lower()) for name in _SAME_NAME},
    "BitwiseNot": lambda x: call("bitnot", x),
    "Softplus": _softplus,
    "Softsign": lambda x: x / (1.0 + call("abs", x)),
    "Mish": lambda x: x * tanh(_softplus(x)),
    "HardSwish": lambda x: x * clip(x * (1.0 / 6.0) + 0.5, 0.0, 1.0),
}

BINARY: dict[str, Callable[[Expr, Expr], Expr]] = {
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Less": lambda x, y: x < y,
    "LessOrEqual": lambda x, y: x <= y,
    "Greater": lambda x, y: x > y,
    "GreaterOrEqual": lambda x, y: x >= y,
    "Equal": lambda x, y: call("eq", x, y),
    "And": lambda x, y: call("and", x, y),
    "Or": lambda x, y: call("or", x, y),
    "Xor": lambda x, y: call("xor", x, y),
    "BitwiseAnd": lambda x, y: call("bitand", x, y),
    "BitwiseOr": lambda x, y: call("bitor", x, y),
    "BitwiseXor": lambda x, y: call("bitxor", x, y),
}

# Functions of one input and float attributes: name → (attribute defaults, expression).
PARAMETRIC: dict[str, tuple[dict[str, float], Callable[..., Expr]]] = {
    "LeakyRelu": ({"alpha": 0.01}, lambda x, alpha: where(x < 0, x * alpha, x)),
    "Elu": ({"alpha": 1.0}, lambda x, alpha: where(x > 0, x, _expm1_below_zero(x) * alpha)),
    "Celu": ({"alpha": 1.0}, lambda x, alpha: where(x > 0, x, _expm1_below_zero(x / alpha) * alpha)),
    "Selu": (
        {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
        lambda x, alpha, gamma: where(x > 0, x, _expm1_below_zero(x) * alpha) * gamma,
    ),
    "HardSigmoid": ({"alpha": 0.2, "beta": 0.5}, lambda x, alpha, beta: clip(x * alpha + beta, 0.0, 1.0)),
    "ThresholdedRelu": ({"alpha": 1.0}, lambda x, alpha: where(x > alpha, x, 0.0)),
    "Swish": ({"alpha": 1.0}, lambda x, alpha: x * sigmoid(x * alpha)),
    "Shrink": (
        {"lambd": 0.5, "bias": 0.0},
        lambda x, lambd, bias: where(x < -lambd, x + bias, where(x > lambd, x - bias, 0.0)),
    ),
    "Affine": ({"alpha": 1.0, "beta": 0.0}, lambda x, alpha, beta: x * alpha + beta),
    "ScaledTanh": ({"alpha": 1.0, "beta": 1.0}, lambda x, alpha, beta: tanh(x * beta) * alpha),
}


@translates(*UNARY)
def _unary(n: OnnxNode) -> Operand:
    return n.map(UNARY[n.op_type], 0)


@translates(*PARAMETRIC)
def _parametric(n: OnnxNode) -> Operand:
    defaults, expression = PARAMETRIC[n.op_type]
    values = {name: n.number(name, default) for name, default in defaults.items()}
    return n.map(lambda x: expression(x, **values), 0, cast_to=n.type(0).dtype)


@translates(*BINARY)
def _binary(n: OnnxNode) -> Operand:
    return _aligned(n).map(BINARY[n.op_type], 0, 1)


def _aligned(n: OnnxNode) -> OnnxNode:
    """The node with its second operand aligned by the attributes `broadcast` and `axis`, as before opset 7."""
    if n.opset >= 7 or not n.integer("broadcast", 0) or not n.has_attribute("axis"):
        return n
    rank = len(n.shape(0))
    behind = rank - n.axis(n.integer("axis"), rank) - len(n.shape(1))
    if behind > 0:
        n.inputs = (n.inputs[0], reshape(n.b, n.value(1), (*n.shape(1), *(1,) * behind)))
    return n


@translates("Div")
def _div(n: OnnxNode) -> Operand:
    is_float = n.type(0).dtype.is_float
    return _aligned(n).map(lambda x, y: x / y if is_float else call("truncdiv", x, y), 0, 1)


@translates("Pow")
def _pow(n: OnnxNode) -> Operand:
    return _aligned(n).map(lambda x, y: x**y, 0, 1, cast_to=n.type(0).dtype)


@translates("Mod")
def _mod(n: OnnxNode) -> Operand:
    return n.map(lambda x, y: call("fmod" if n.integer("fmod", 0) else "mod", x, y), 0, 1)


@translates("BitShift")
def _bit_shift(n: OnnxNode) -> Operand:
    direction = n.text("direction")
    if direction not in ("LEFT", "RIGHT"):
        raise n.fail(f"direction must be LEFT or RIGHT, and is {direction!r}")
    return n.map(lambda x, y: call("shiftleft" if direction == "LEFT" else "shiftright", x, y), 0, 1)


_MOST = 16  # operands of one expression


@translates("Sum", "Mean", "Max", "Min")
def _variadic(n: OnnxNode) -> Operand:
    count = len(n.inputs)
    if count == 0:
        raise n.fail("it has no inputs")
    if count == 1:
        return n.operand(0)
    function = {"Sum": "add", "Mean": "add", "Max": "max", "Min": "min"}[n.op_type]

    def combine(*parts: Expr) -> Expr:
        return reduce(lambda x, y: call(function, x, y), parts)

    def last(*parts: Expr) -> Expr:
        return combine(*parts) * (1.0 / count) if n.op_type == "Mean" else combine(*parts)

    dtype, given = n.type(0).dtype, n.inputs
    n.inputs = given[:_MOST]
    for at in range(_MOST, count, _MOST - 1):
        n.inputs = (n.map(combine, cast_to=dtype), *given[at : at + _MOST - 1])
    return n.map(last, cast_to=dtype)


@translates("PRelu")
def _prelu(n: OnnxNode) -> Operand:
    rank, slope = len(n.shape(0)), n.shape(1)
    if n.opset < 7 and len(slope) == 1 and slope[0] != 1 and rank > 2:
        n.inputs = (n.inputs[0], reshape(n.b, n.value(1), (slope[0], *(1,) * (rank - 2))))
    return n.map(lambda x, slope: where(x < 0, x * slope, x), 0, 1)


@translates("Clip")
def _clip(n: OnnxNode) -> Operand:
    dtype = n.type(0).dtype
    if n.opset < 11:
        low, high = n.number("min", -math.inf), n.number("max", math.inf)
        return n.map(lambda x: clip(x, low, high), 0, cast_to=dtype)
    given = [i for i in (1, 2) if n.has(i)]
    if dtype.is_float:
        bounds: list[Scalar] = [-math.inf, math.inf]

        def both(x: Expr, *found: Expr) -> Expr:
            limits: list[Expr | Scalar] = list(bounds)
            for i, limit in zip(given, found):
                limits[i - 1] = limit
            return clip(x, *limits)

        return n.map(both, 0, *given) if given else n.operand(0)

    def integers(x: Expr, *found: Expr) -> Expr:
        for i, limit in zip(given, found):
            x = call("max" if i == 1 else "min", x, limit)
        return x

    return n.map(integers, 0, *given)


@translates("Gelu")
def _gelu(n: OnnxNode) -> Operand:
    return n.map(gelu if n.text("approximate", "none") == "none" else tanh_gelu, 0)


def gelu(x: Expr) -> Expr:
    """x·Φ(x) of the normal distribution (Hendrycks and Gimpel 2016)."""
    return x * 0.5 * (erf(x * math.sqrt(0.5)) + 1.0)


def tanh_gelu(x: Expr) -> Expr:
    """Its approximation by tanh."""
    return x * 0.5 * (tanh((x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)) + 1.0)


@translates("IsInf")
def _is_inf(n: OnnxNode) -> Operand:
    negative, positive = n.integer("detect_negative", 1), n.integer("detect_positive", 1)

    def test(x: Expr) -> Expr:
        found = call("isinf", x)
        if not negative:
            found = call("and", found, x > 0)
        return found if positive else call("and", found, x < 0)

    return n.map(test, 0)


@translates("Cast", "CastLike")
def _cast(n: OnnxNode) -> Operand:
    dtype = as_dtype(dtype_of(n.integer("to"), n.where)) if n.op_type == "Cast" else n.type(1).dtype
    old = n.type(0).dtype
    if old == dtype:
        return n.operand(0)
    if dtype.is_storage:
        rounding = n.text("round_mode", "up")
        if rounding not in ROUNDINGS:
            raise n.fail(f"round_mode must be {', '.join(ROUNDINGS)}, and is {rounding!r}")
        return encoded(n.b, n.value(0), dtype, bool(n.integer("saturate", 1)), rounding)
    return convert(n.b, decoded(n.b, n.value(0)), dtype) if old.is_storage else n.map(lambda x: cast(x, dtype), 0)


@translates("BitCast")
def _bit_cast(n: OnnxNode) -> Operand:
    dtype = as_dtype(dtype_of(n.integer("to"), n.where))
    if "bool" in (dtype.name, n.type(0).dtype.name):  # a byte of 0 or 1
        return convert(n.b, n.value(0), dtype)
    return bitcast(n.b, n.value(0), dtype)


@translates("Where")
def _where(n: OnnxNode) -> Operand:
    condition = n.literal(0)
    if condition is not None:
        from foreplan.graph.types import broadcast_shapes

        shape = broadcast_shapes(n.shape(0), n.shape(1), n.shape(2))
        return broadcast_to(n.b, n.value(1 if condition.value else 2), shape)
    return n.map(where, 0, 1, 2, cast_to=n.type(1).dtype, whole=(0,) if n.type(1).dtype.is_float else (0, 1))


@translates("Identity")
def _identity(n: OnnxNode) -> Operand:
    return n.operand(0)
