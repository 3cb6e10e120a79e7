"""ATen ops of one element each: most are one line of a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.masks import Diagonals, applied, compact, diagonals
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, as_bool, convert, scalar_function
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph import DType
from foreplan.graph.types import BOOL
from foreplan.ops.expr import Expr, as_expr, call, cast, clip, erf, exp, log, tanh, where
from foreplan.ops.marks import StopGradient


def _softplus(x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    found = (call("max", x * beta, 0.0) + call("log1p", exp(-call("abs", x * beta)))) / beta
    return found if threshold >= 20.0 else where(x * beta > threshold, x, found)


def _elu(x: Expr, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Expr:
    return where(x > 0.0, x * scale, call("expm1", call("min", x, 0.0) * input_scale) * (alpha * scale))


def _add(x: Any, y: Any, alpha: float = 1) -> Any:
    return x + (y if alpha == 1 else y * alpha)


def _sub(x: Any, y: Any, alpha: float = 1) -> Any:
    return x - (y if alpha == 1 else y * alpha)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else call("max", x, low)
    return x if high is None else call("min", x, high)


def _hard_shrink(x: Any, width: float = 0.5) -> Any:
    return where(call("abs", x) > width, x, 0.0)


def _soft_shrink(x: Any, width: float = 0.5) -> Any:
    return where(x > width, x - width, where(x < -width, x + width, 0.0))


def _xlogy(x: Any, y: Any) -> Any:
    return where(call("eq", x, 0.0), 0.0, x * log(where(call("eq", x, 0.0), 1.0, y)))


_PLAIN = (  # which a scalar function of that name is
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "cos", "cosh", "erf", "exp"),
    *("expm1", "floor", "fmod", "log", "log1p", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "trunc"),
)
_AS_NUMPY = (  # which a ufunc of that name is
    *("absolute", "arctan", "arctan2", "copysign", "deg2rad", "exp2", "floor_divide", "fmax", "fmin", "heaviside"),
    *("hypot", "log10", "log2", "maximum", "minimum", "negative", "rad2deg", "remainder"),
)
# Functions of numbers: operands are converted to the element type of the result first, and literals stay literals.
_NUMBERS: dict[str, Callable[..., Any]] = {
    **{name: partial(call, name) for name in _PLAIN},
    **{name: scalar_function(name) for name in _AS_NUMPY},
    "add": _add,
    "sub": _sub,
    "subtract": _sub,
    "rsub": lambda x, y, alpha=1: y - (x if alpha == 1 else x * alpha),
    "mul": lambda x, y: x * y,
    "multiply": lambda x, y: x * y,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1.0 / x,
    "sgn": lambda x: call("sign", x),
    "fix": lambda x: call("trunc", x),
    "frac": lambda x: x - call("trunc", x),
    "sinc": lambda x: where(
        call("eq", x, 0.0), 1.0, call("sin", x * math.pi) / where(call("eq", x, 0.0), 1.0, x * math.pi)
    ),
    "special_erf": erf,
    "erfc": lambda x: 1.0 - erf(x),
    "logit": lambda x, eps=None: log(
        _clamp(x, eps, None if eps is None else 1 - eps) / (1.0 - _clamp(x, eps, None if eps is None else 1 - eps))
    ),
    "xlogy": _xlogy,
    "special_xlogy": _xlogy,
    "softplus": _softplus,
    "softsign": lambda x: x / (1.0 + call("abs", x)),
    "tanhshrink": lambda x: x - tanh(x),
    "log_sigmoid": lambda x: -_softplus(-x),
    "elu": _elu,
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1.0 / alpha),
    "threshold": lambda x, at, value: where(x > at, x, value),
    "hardtanh": lambda x, low=-1.0, high=1.0: clip(x, low, high),
    "hardshrink": _hard_shrink,
    "softshrink": _soft_shrink,
    "clamp_min": lambda x, low: call("max", x, low),
    "clamp_max": lambda x, high: call("min", x, high),
    "lerp": lambda x, y, weight: x + (y - x) * weight,
    "addcmul": lambda x, a, b, value=1: x + a * b * value,
    "addcdiv": lambda x, a, b, value=1: x + a / b * value,
    "__lshift__": lambda x, y: call("shiftleft", x, y),
    "__rshift__": lambda x, y: call("shiftright", x, y),
    "bitwise_left_shift": lambda x, y: call("shiftleft", x, y),
    "bitwise_right_shift": lambda x, y: call("shiftright", x, y),
}
_LOGIC = {
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
    "logical_not": "not",
}
_BITS = {
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "not",
    "__and__": "and",
    "__or__": "or",
    "__xor__": "xor",
}
_COMPARISONS = {
    **{name: name for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
}


def numbers(c: Call, name: str, fn: Callable[..., Any], *operands: Any, dtype: DType | None = None) -> Tensor:
    """A function of operands that are converted to one element type first: that of the result, if nothing is said."""
    wanted = c.dtype if dtype is None else dtype
    given = [as_operand(c, x, wanted) for x in operands]
    if not any(isinstance(x, Tensor | Diagonals) for x in given):
        given[0] = c.tensor(given[0], wanted)
    found = applied(name, lambda *args: cast(as_expr(fn(*args)), wanted), given)
    return broadcast(found, c.shape)


def as_operand(c: Call, x: Any, wanted: DType) -> Any:
    """A literal, a tensor of an element type, or a known mask."""
    if isinstance(x, np.ndarray):
        x = compact(x) if x.ndim else x.item()
    if isinstance(x, bool | int | float):
        return float(x) if wanted.is_float else x
    if isinstance(x, np.ndarray) and x.dtype == wanted.numpy and (found := diagonals(x)) is not None:
        return found
    return convert(c.tensor(x), wanted) if isinstance(x, np.ndarray | Tensor) else x


def broadcast(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor in a shape that it broadcasts to."""
    if x.shape == shape:
        return x
    found: Any = np.broadcast_to(x, shape)
    return as_tensor(found)


# Arguments of these by place are numbers that shape the function, and no operands.
_SHAPED = frozenset(
    [
        "softplus",
        "elu",
        "celu",
        "threshold",
        "hardtanh",
        "hardshrink",
        "softshrink",
        "logit",
    ]
)


def _declare_numbers(name: str, fn: Callable[..., Any]) -> None:
    @aten(name)
    def handler(c: Call, *args: Any, **kwargs: Any) -> Tensor:
        if name in _SHAPED:
            x, *rest = args
            return numbers(c, name, lambda x: fn(x, *rest, **kwargs), x)
        more = {key: value.item() if isinstance(value, np.ndarray) else value for key, value in kwargs.items()}
        return numbers(c, name, lambda *xs: fn(*xs, **more), *args)


for _name, _fn in _NUMBERS.items():
    _declare_numbers(_name, _fn)


def _declare_logic(name: str, function: str) -> None:
    @aten(name)
    def handler(c: Call, *args: Any) -> Tensor:
        operands = [x if isinstance(x, bool) else as_bool(c.tensor(x)) for x in args]
        return broadcast(apply(name, lambda *xs: call(function, *xs), *operands), c.shape)


for _name, _function in _LOGIC.items():
    _declare_logic(_name, _function)


def _declare_bits(name: str, function: str) -> None:
    @aten(name)
    def handler(c: Call, *args: Any) -> Tensor:
        kind = function if c.dtype.category == "bool" else f"bit{function}"
        return numbers(c, name, lambda *xs: call(kind, *xs), *args)


for _name, _function in _BITS.items():
    _declare_bits(_name, _function)


def _declare_comparison(name: str, function: str) -> None:
    @aten(name)
    def handler(c: Call, x: Any, y: Any) -> Tensor:
        operands = [x.item() if isinstance(x, np.ndarray) and not x.ndim else x for x in (x, y)]
        kinds = [each.value.dtype if isinstance(each, Tensor) else None for each in operands]
        floats = any(kind is not None and kind.is_float for kind in kinds) or any(
            isinstance(each, float) for each in operands
        )
        given = []
        for each in operands:
            tensor = each if isinstance(each, bool | int | float) else c.tensor(each)
            if isinstance(tensor, Tensor) and floats and not tensor.value.dtype.is_float:
                tensor = convert(tensor, "float32")
            given.append(float(tensor) if floats and isinstance(tensor, bool | int) else tensor)
        return broadcast(apply(name, lambda a, b: call(function, a, b), *given), c.shape)


for _name, _function in _COMPARISONS.items():
    _declare_comparison(_name, _function)


@aten("isnan", "isinf")
def _is(c: Call, x: Any) -> Tensor:
    return apply(c.name, lambda x: call(c.name, x), c.tensor(x))


@aten("isfinite")
def _isfinite(c: Call, x: Any) -> Tensor:
    return apply("isfinite", lambda x: call("not", call("or", call("isnan", x), call("isinf", x))), c.tensor(x))


@aten("nan_to_num")
def _nan_to_num(c: Call, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    largest = c.dtype.largest

    def fn(x: Expr) -> Expr:
        finite = where(call("and", call("isinf", x), x > 0.0), largest if posinf is None else posinf, x)
        finite = where(call("and", call("isinf", x), x < 0.0), -largest if neginf is None else neginf, finite)
        return where(call("isnan", x), nan or 0.0, finite)

    return numbers(c, "nan_to_num", fn, x)


@aten("clamp", "clip")
def _clamped(c: Call, x: Any, low: Any = None, high: Any = None, **named: Any) -> Tensor:
    low, high = named.get("min", low), named.get("max", high)
    given = [each for each in (low, high) if each is not None]

    def fn(x: Any, *bounds: Any) -> Any:
        rest = iter(bounds)
        return _clamp(x, None if low is None else next(rest), None if high is None else next(rest))

    return numbers(c, "clamp", fn, x, *given)


@aten("round")
def _round(c: Call, x: Any, decimals: int = 0) -> Tensor:
    factor = 10.0**decimals
    return numbers(c, "round", lambda x: call("round", x * factor) / factor if decimals else call("round", x), x)


@aten("div", "divide", "true_divide")
def _div(c: Call, x: Any, y: Any, rounding_mode: str | None = None) -> Tensor:
    kind = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}[rounding_mode]
    if kind == "truncdiv" and c.dtype.is_float:
        return numbers(c, "div", lambda a, b: call("trunc", a / b), x, y)
    return numbers(c, "div", lambda a, b: a / b if kind == "div" else call(kind, a, b), x, y)


@aten("where")
def _where(c: Call, condition: Any, x: Any = None, y: Any = None) -> Tensor:
    if x is None:
        raise UnsupportedError("where(condition) alone gives a shape that depends on data")
    return _selected(c, condition, x, y)


@aten("masked_fill")
def _masked_fill(c: Call, x: Any, mask: Any, value: Any) -> Tensor:
    return _selected(c, mask, value, x)


def _selected(c: Call, condition: Any, x: Any, y: Any) -> Tensor:
    is_mask = isinstance(condition, np.ndarray) and condition.ndim > 0 and condition.dtype == bool
    asked = as_operand(c, condition, BOOL) if is_mask else as_bool(c.tensor(condition))
    a, b = (as_operand(c, each, c.dtype) for each in (x, y))
    return broadcast(applied("where", lambda *args: cast(where(*args), c.dtype), [asked, a, b]), c.shape)


@aten("prelu")
def _prelu(c: Call, x: Any, weight: Any) -> Tensor:
    w = c.tensor(weight)
    w = w.reshape(-1, *[1] * (c.tensor(x).ndim - 2)) if w.size > 1 else w.reshape(())
    return numbers(c, "prelu", lambda x, w: where(x > 0.0, x, x * w), x, w)


# Activations that foreplan's own layers have: by PyTorch's names, as fp.nn calls them.
_ACTIVATIONS = {
    **{
        name: name for name in ("gelu", "glu", "leaky_relu", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "tanh")
    },
    "hardsigmoid": "hard_sigmoid",
    "hardswish": "hard_swish",
    "special_expit": "sigmoid",
}


@aten(*_ACTIVATIONS)
def _activation(c: Call, x: Any, *options: Any, **named: Any) -> Any:
    own = getattr(nn, _ACTIVATIONS[c.name.removesuffix("_")])
    return own(convert(c.tensor(x), c.dtype), *options, **named)


@aten("to", "_to_copy", "type_as", "float", "half", "double", "bfloat16", "_autocast_to_reduced_precision")
def _to(c: Call, x: Any, *_: Any, **__: Any) -> Tensor:
    return _as_element(c.tensor(x), c.dtype)


def _as_element(x: Tensor, dtype: DType) -> Tensor:
    return as_bool(x) if dtype.category == "bool" else convert(x, dtype)


@aten(
    *("contiguous", "clone", "lift_fresh_copy", "lift_fresh", "positive", "resolve_neg"),
    *("conj", "resolve_conj", "conj_physical", "_conj", "_conj_physical"),
)
def _same(c: Call, x: Any, *_: Any, **__: Any) -> Tensor:
    return c.tensor(x)


@aten("alias", views=True)
def _alias(c: Call, x: Any, *_: Any, **__: Any) -> Tensor:
    return c.tensor(x)


@aten("item", "_local_scalar_dense")
def _item(c: Call, x: Any) -> Tensor:
    """A number that data gives, as a tensor of which no gradient comes back."""
    return _detach(c, c.tensor(x).reshape(()))


@aten("detach", views=True)
def _detach(c: Call, x: Any) -> Tensor:
    found = c.tensor(x)
    return c.wrap(c.b.apply(StopGradient(), found.value)) if found.value.dtype.is_float else found


@aten("copy_")
def _copy(c: Call, x: Any, y: Any, non_blocking: bool = False) -> Tensor:
    return broadcast(_as_element(c.tensor(y), c.dtype), c.shape)


@aten("fill", "full_like")
def _fill(c: Call, x: Any, value: Any, **_: Any) -> Tensor:
    return broadcast(_as_element(c.tensor(value, c.dtype), c.dtype), c.shape)


def _full(c: Call, value: Any) -> np.ndarray:
    return np.full(c.shape, value, c.dtype.numpy)


@aten("zeros_like", "zero", "new_zeros", "empty_like", "new_empty", "zeros", "empty")
def _zeros(c: Call, *_: Any, **__: Any) -> np.ndarray:
    return _full(c, 0)


@aten("ones_like", "new_ones", "ones")
def _ones(c: Call, *_: Any, **__: Any) -> np.ndarray:
    return _full(c, 1)


@aten("new_full", "full")
def _new_full(c: Call, *args: Any, **_: Any) -> Any:
    value = args[-1]
    return broadcast(c.tensor(value), c.shape) if isinstance(value, Tensor) else _full(c, value)
