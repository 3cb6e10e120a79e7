"""Element-wise functions of traced tensors: NumPy's and SciPy's ufuncs, as `map` expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.methods import for_tensors, of_tensors
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, common_float, is_scalar, literal, note_infinite
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph import DType, Value, as_dtype
from foreplan.ops import expr as ex
from foreplan.ops.expr import FUNCTIONS, Arg, Call, Const, Expr, as_expr, call, infer_dtypes, used_args, where
from foreplan.ops.map import Map, elementwise

# ufunc name → the scalar function of the same meaning.
_SAME = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "power": "pow",
    "float_power": "pow",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "fmod": "fmod",
    "maximum": "max",
    "minimum": "min",
    "arctan2": "atan2",
    "negative": "neg",
    "absolute": "abs",
    "fabs": "abs",
    "sign": "sign",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "rint": "round",
    "square": "square",
    "sqrt": "sqrt",
    "reciprocal": "reciprocal",
    "exp": "exp",
    "expm1": "expm1",
    "log": "log",
    "log1p": "log1p",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "sinh": "sinh",
    "cosh": "cosh",
    "tanh": "tanh",
    "arcsinh": "asinh",
    "arccosh": "acosh",
    "arctanh": "atanh",
    "expit": "sigmoid",
    "erf": "erf",
    "isnan": "isnan",
    "isinf": "isinf",
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
    "logical_not": "not",
    "bitwise_and": "bitand",
    "bitwise_or": "bitor",
    "bitwise_xor": "bitxor",
    "invert": "bitnot",
    "left_shift": "shiftleft",
    "right_shift": "shiftright",
    "clip": "clip",
}


def _is_negative(x: Expr) -> Expr:
    """Whether a number has the sign bit: it is below zero, or a zero whose reciprocal is."""
    return call("or", x < 0.0, call("and", call("eq", x, 0.0), 1.0 / x < 0.0))


# ufuncs written with several scalar functions.
_COMPOSED: dict[str, Callable[..., Expr]] = {
    "positive": lambda x: x,
    "exp2": lambda x: call("exp", x * math.log(2.0)),
    "log2": lambda x: call("log", x) * (1.0 / math.log(2.0)),
    "log10": lambda x: call("log", x) * (1.0 / math.log(10.0)),
    "hypot": lambda x, y: call("sqrt", call("square", x) + call("square", y)),
    "logaddexp": lambda x, y: call("max", x, y) + call("log1p", call("exp", -call("abs", x - y))),
    "isfinite": lambda x: call("not", call("or", call("isnan", x), call("isinf", x))),
    "deg2rad": lambda x: x * (math.pi / 180.0),
    "radians": lambda x: x * (math.pi / 180.0),
    "rad2deg": lambda x: x * (180.0 / math.pi),
    "degrees": lambda x: x * (180.0 / math.pi),
    "heaviside": lambda x, y: where(call("eq", x, 0.0), y, where(call("gt", x, 0.0), 1.0, 0.0)),
    "cbrt": lambda x: call("sign", x) * call("pow", call("abs", x), 1.0 / 3.0),
    "conjugate": lambda x: x,
    "copysign": lambda x, y: where(_is_negative(y), -call("abs", x), call("abs", x)),
    "fmax": lambda x, y: where(call("isnan", x), y, where(call("isnan", y), x, call("max", x, y))),
    "fmin": lambda x, y: where(call("isnan", x), y, where(call("isnan", y), x, call("min", x, y))),
    "logaddexp2": lambda x, y: (
        call("max", x, y) + call("log1p", call("exp", -call("abs", x - y) * math.log(2.0))) * (1.0 / math.log(2.0))
    ),
    "signbit": lambda x: _is_negative(x),
    "logit": lambda x: call("log", x / (1.0 - x)),
}
_PRODUCTS = ("matmul", "matvec", "vecmat", "vecdot")
_LOGIC = ("and", "or", "xor", "not")
_BITS = {"bitand": "and", "bitor": "or", "bitxor": "xor", "bitnot": "not"}
_LITERAL_DTYPES = {"float64": "float32", "int64": "int64", "bool": "bool"}
# Those that give floating-point numbers for integers too, and whose expressions alone would not.
_FLOATS = ("fabs", "rint", "float_power", "copysign", "heaviside", "modf", "cbrt", "signbit")
_REDUCTIONS = {"add": np.sum, "multiply": np.prod, "maximum": np.max, "minimum": np.min}


def supported_ufuncs() -> tuple[str, ...]:
    """Names of the NumPy and SciPy ufuncs that traced tensors take."""
    return tuple(sorted({*_SAME, *_COMPOSED, *_PRODUCTS, "divmod", "modf"}))


def scalar_function(name: str) -> Callable[..., Expr]:
    """What a ufunc is of one element of each operand."""
    return _COMPOSED.get(name) or partial(call, _SAME[name])


@for_tensors
def apply_ufunc(ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A ufunc called with at least one traced tensor.

    Raises:
        TraceError: the ufunc, the way it is called, or an argument cannot be traced.
    """
    name = ufunc.__name__
    if method == "reduce" and name in _REDUCTIONS:
        kwargs.setdefault("axis", 0)
        return _REDUCTIONS[name](*inputs, **kwargs)  # type: ignore[operator]
    if method != "__call__":
        raise fail(f"np.{name}.{method} cannot be traced; use np.sum, np.prod, np.max, np.min or np.cumsum")
    dtype = kwargs.pop("dtype", None)
    kwargs.pop("casting", None)
    if kwargs.get("out") is not None:
        raise fail(f"np.{name}(…, out=…) cannot be traced: traced tensors never change; use the result")
    if kwargs.get("where", True) is not True:
        raise fail(f"np.{name}(…, where=…) cannot be traced; use np.where around the result")
    if name in _FLOATS:
        inputs = [convert(x, "float32") if isinstance(x, Tensor) and not x.value.dtype.is_float else x for x in inputs]
    if name == "conjugate" and as_tensor(inputs[0]).value.dtype.category == "bool":
        return convert(as_tensor(inputs[0]), "int8")  # as NumPy does
    if name == "reciprocal" and not as_tensor(inputs[0]).value.dtype.is_float:
        raise fail("np.reciprocal of integers is 0, 1 or -1; convert them with astype first")
    if name in _PRODUCTS:
        result = of_tensors(name)(*inputs)
    elif name in ("divmod", "modf"):
        whole = np.floor_divide(*inputs) if name == "divmod" else np.trunc(*inputs)
        return (whole, np.remainder(*inputs)) if name == "divmod" else (inputs[0] - whole, whole)
    elif name in _COMPOSED:
        result = apply(name, scalar_function(name), *inputs)
    elif name in _SAME:
        result = apply_function_named(_SAME[name], *inputs)
    else:
        raise fail(f"np.{name} cannot be traced; write it with the ufuncs {', '.join(supported_ufuncs())}")
    return result if dtype is None else convert(result, dtype)


def apply_function_named(function: str, *operands: Any) -> Tensor:
    """A scalar function of the expression table; `&`, `|`, `^`, `~` of booleans are logical."""
    kinds = [np.dtype(bool) if isinstance(x, bool) else getattr(x, "dtype", None) for x in operands]
    if function in _BITS and all(kind == np.dtype(bool) for kind in kinds):
        function = _BITS[function]
    if function in _LOGIC:
        operands = tuple(x if is_scalar(x) else as_bool(as_tensor(x)) for x in operands)
    if function == "pow" and is_scalar(operands[1]) and literal(operands[1]) in (0.5, -0.5):
        function, operands = "sqrt" if literal(operands[1]) == 0.5 else "rsqrt", operands[:1]
    return apply(function, lambda *args: call(function, *args), *operands)


def apply(name: str, fn: Callable[..., Expr], *operands: Any) -> Tensor:
    """A scalar function of tensors, arrays and literals, broadcast against each other.

    Args:
        name: of the node.
        fn: from expressions to an expression.
        operands: at least one of them a tensor.

    Raises:
        ShapeError: the operands do not broadcast.
    """
    like = common_float(*operands)
    values: list[Value] = []
    exprs: list[Expr] = []
    for operand in operands:
        if is_scalar(operand):
            number = literal(operand)
            exprs.append(Const(number))
            if like is not None and abs(number) > like.largest:
                note_infinite(np.asarray(float(number)), like)
            continue
        value = as_tensor(operand, like).value
        if value not in values:
            values.append(value)
        exprs.append(Arg(values.index(value)))
    tracer = current()
    b = tracer.at()
    expr = as_expr(fn(*exprs))
    if len(used_args(expr)) < len(values) or isinstance(expr, Arg):
        # Simplification removed arithmetic with 0 and 1, and with it perhaps a shape or an element type.
        whole = Call(name, tuple(exprs)) if name in FUNCTIONS else expr
        dtype = infer_dtypes([value.dtype for value in values], whole)[whole]
        if not isinstance(expr, Arg) or len(values) > 1 or values[0].dtype != dtype:
            return Tensor(tracer, b.apply(Map((str(whole),)), *values, name=name))
    return Tensor(tracer, elementwise(b, expr, *values, name=name))


@for_tensors
def convert(x: Any, dtype: DType | str | np.dtype | type) -> Tensor:
    """Elements of `x` converted to another type; floats to integers are truncated toward zero.

    Raises:
        TraceError: foreplan has no such element type.
    """
    try:
        wanted = as_dtype(dtype)
    except (ShapeError, TypeError) as error:
        raise fail(str(error)) from None
    tensor = as_tensor(x, wanted)
    if tensor.value.dtype == wanted:
        return tensor
    b = tensor.tracer.at()
    return Tensor(tensor.tracer, elementwise(b, ex.cast(Arg(0), wanted), tensor.value, name="cast"))


def as_bool(x: Tensor) -> Tensor:
    """Whether each element is nonzero."""
    return x if x.value.dtype.category == "bool" else apply_function_named("ne", x, 0)


def zero_of(x: Any) -> int | bool:
    """The number that stands for nothing in a tensor: False among booleans."""
    return False if as_tensor(x).value.dtype.category == "bool" else 0


def select(condition: Any, a: Any, b: Any) -> Tensor:
    """`a` where the condition holds, else `b`; all three broadcast."""
    like = common_float(a, b)
    condition = as_bool(as_tensor(condition))
    if is_scalar(a) and is_scalar(b):
        # Literals alone have no element type in an expression; NumPy's type is used, which people expect.
        kind = np.result_type(type(literal(a)), type(literal(b))).name
        return apply("where", lambda c, a, b: ex.cast(Call("where", (c, a, b)), _LITERAL_DTYPES[kind]), condition, a, b)
    return apply("where", where, condition, *(x if is_scalar(x) else as_tensor(x, like) for x in (a, b)))
