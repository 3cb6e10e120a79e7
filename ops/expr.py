"""Scalar expressions: what `map` computes at each element. One table states every function; the NumPy kernel, the
derivative, the text form and every engine's kernel come from it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from foreplan.errors import ModelError, ShapeError
from foreplan.graph.types import BOOL, DTYPES, FLOAT32, INT64, DType, as_dtype

Scalar = float | int | bool


class Expr:
    """A scalar expression over arguments a0, a1, …; built with Python operators and the functions of this module."""

    def __add__(self, other: Expr | Scalar) -> Expr:
        return call("add", self, other)

    def __radd__(self, other: Scalar) -> Expr:
        return call("add", other, self)

    def __sub__(self, other: Expr | Scalar) -> Expr:
        return call("sub", self, other)

    def __rsub__(self, other: Scalar) -> Expr:
        return call("sub", other, self)

    def __mul__(self, other: Expr | Scalar) -> Expr:
        return call("mul", self, other)

    def __rmul__(self, other: Scalar) -> Expr:
        return call("mul", other, self)

    def __truediv__(self, other: Expr | Scalar) -> Expr:
        return call("div", self, other)

    def __rtruediv__(self, other: Scalar) -> Expr:
        return call("div", other, self)

    def __pow__(self, other: Expr | Scalar) -> Expr:
        return call("pow", self, other)

    def __neg__(self) -> Expr:
        return call("neg", self)

    def __lt__(self, other: Expr | Scalar) -> Expr:
        return call("lt", self, other)

    def __le__(self, other: Expr | Scalar) -> Expr:
        return call("le", self, other)

    def __gt__(self, other: Expr | Scalar) -> Expr:
        return call("gt", self, other)

    def __ge__(self, other: Expr | Scalar) -> Expr:
        return call("ge", self, other)

    def __and__(self, other: Expr | Scalar) -> Expr:
        return call("and", self, other)

    def __bool__(self) -> bool:
        raise TypeError("an expression has no truth value; use where(condition, a, b)")


@dataclass(frozen=True)
class Arg(Expr):
    """The element of input `index`."""

    index: int

    def __str__(self) -> str:
        return f"a{self.index}"


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """A literal; takes the element type of what it meets."""

    value: Scalar

    # In Python 1 == 1.0 == True and 0.0 == -0.0; here they are four different literals.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, eq=False)
class Call(Expr):
    """A function of expressions; `function` is a key of FUNCTIONS or an element type (a conversion)."""

    function: str
    args: tuple[Expr, ...]

    @cached_property
    def _key(self) -> tuple[str, tuple[Expr, ...]]:
        return (self.function, self.args)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Call) and self._hash == other._hash and self._key == other._key)

    def __str__(self) -> str:
        symbol = FUNCTIONS[self.function].symbol if self.function in FUNCTIONS else ""
        if symbol and len(self.args) == 2:
            return f"({self.args[0]} {symbol} {self.args[1]})"
        return f"{_TEXT_NAMES.get(self.function, self.function)}({', '.join(map(str, self.args))})"


# and/or/not are Python keywords, so their calls are written with these names.
_TEXT_NAMES = {"and": "and_", "or": "or_", "not": "not_"}

Partials = Callable[..., Sequence[Expr | Scalar | None]]


@dataclass(frozen=True)
class Function:
    """One scalar function.

    Attributes:
        compute: a NumPy ufunc taking `out=`.
        arity: number of arguments.
        result: `same` (the promoted type of the arguments), `bool`, or `float` (the promoted type, never an integer).
        partials: from (args…, y) the partial derivatives; y is the function's own result. None: not differentiable.
        uses_output: the partials read y and not the arguments, so that a root call needs only its output kept.
        symbol: infix form, if it has one.
    """

    compute: Callable[[], Callable[..., Any]]
    arity: int
    result: str = "same"
    partials: Partials | None = None
    uses_output: bool = False
    symbol: str = ""


def _np(name: str) -> Callable[[], Callable[..., Any]]:
    return lambda: getattr(np, name)


def _scipy(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        import scipy.special

        return getattr(scipy.special, name)

    return load


def _relu() -> Callable[..., Any]:
    return lambda x, out: np.maximum(x, out.dtype.type(0), out=out)


def _where() -> Callable[..., Any]:
    def where(condition: Any, a: Any, b: Any, out: np.ndarray) -> None:
        # out may share its bytes with a or b (same element, so either order of copies is right for the other one).
        if a is out or (isinstance(a, np.ndarray) and np.may_share_memory(a, out)):
            np.copyto(out, b, where=~condition if np.ndim(condition) == 0 else np.logical_not(condition))
            if a is not out:
                np.copyto(out, a, where=condition)
        else:
            np.copyto(out, b)
            np.copyto(out, a, where=condition)

    return where


def _rsqrt() -> Callable[..., Any]:
    def rsqrt(x: Any, out: np.ndarray) -> None:
        np.sqrt(x, out=out)
        np.reciprocal(out, out=out)

    return rsqrt


def _trunc_div() -> Callable[..., Any]:
    def trunc_div(a: Any, b: Any, out: np.ndarray) -> None:
        # C's integer division: the quotient rounded toward zero, as ONNX Div asks for integers.
        quotient = np.floor_divide(a, b)
        quotient += (np.remainder(a, b) != 0) & ((np.asarray(a) < 0) != (np.asarray(b) < 0))
        out[...] = quotient

    return trunc_div


def _max_partials(a: Expr, b: Expr, y: Expr) -> Sequence[Expr]:
    share = where(call("eq", a, b), 0.5, 1.0)  # a tie is shared, as JAX and PyTorch do
    return where(a >= b, share, 0.0), where(b >= a, share, 0.0)


def _min_partials(a: Expr, b: Expr, y: Expr) -> Sequence[Expr]:
    share = where(call("eq", a, b), 0.5, 1.0)
    return where(a <= b, share, 0.0), where(b <= a, share, 0.0)


def _pow_partials(a: Expr, b: Expr, y: Expr) -> Sequence[Expr]:
    if isinstance(b, Const):
        return b.value * a ** (b.value - 1), Const(0.0)
    return b * a ** (b - 1), where(a > 0, y * call("log", where(a > 0, a, 1.0)), 0.0)


def _inside(low: Expr, high: Expr, y: Expr) -> Expr:
    return where(call("and", y > low, y < high), 1.0, 0.0)


def _zero(*args: Expr) -> Sequence[Scalar]:
    return tuple(0.0 for _ in args[:-1])


_TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)

FUNCTIONS: dict[str, Function] = {
    "add": Function(_np("add"), 2, "same", lambda a, b, y: (1.0, 1.0), symbol="+"),
    "sub": Function(_np("subtract"), 2, "same", lambda a, b, y: (1.0, -1.0), symbol="-"),
    "mul": Function(_np("multiply"), 2, "same", lambda a, b, y: (b, a), symbol="*"),
    "div": Function(_np("true_divide"), 2, "float", lambda a, b, y: (1.0 / b, -(a / b) / b), symbol="/"),
    "pow": Function(_np("power"), 2, "same", _pow_partials, symbol="**"),
    "floordiv": Function(_np("floor_divide"), 2, "same", _zero),
    "truncdiv": Function(_trunc_div, 2, "same", _zero),
    "mod": Function(_np("remainder"), 2, "same", lambda a, b, y: (1.0, -call("floor", a / b))),
    "fmod": Function(_np("fmod"), 2, "same", lambda a, b, y: (1.0, -call("trunc", a / b))),
    "max": Function(_np("maximum"), 2, "same", _max_partials),
    "min": Function(_np("minimum"), 2, "same", _min_partials),
    "atan2": Function(_np("arctan2"), 2, "float", lambda a, b, y: (b / (a * a + b * b), -a / (a * a + b * b))),
    "neg": Function(_np("negative"), 1, "same", lambda x, y: (-1.0,)),
    "abs": Function(_np("absolute"), 1, "same", lambda x, y: (call("sign", x),)),
    "sign": Function(_np("sign"), 1, "same", _zero),
    "floor": Function(_np("floor"), 1, "same", _zero),
    "ceil": Function(_np("ceil"), 1, "same", _zero),
    "trunc": Function(_np("trunc"), 1, "same", _zero),
    "round": Function(_np("rint"), 1, "same", _zero),
    "square": Function(_np("square"), 1, "same", lambda x, y: (2.0 * x,)),
    "sqrt": Function(_np("sqrt"), 1, "float", lambda x, y: (0.5 / y,), True),
    "rsqrt": Function(_rsqrt, 1, "float", lambda x, y: (-0.5 * y * y * y,), True),
    "reciprocal": Function(_np("reciprocal"), 1, "float", lambda x, y: (-(y * y),), True),
    "exp": Function(_np("exp"), 1, "float", lambda x, y: (y,), True),
    "expm1": Function(_np("expm1"), 1, "float", lambda x, y: (y + 1.0,), True),
    "log": Function(_np("log"), 1, "float", lambda x, y: (1.0 / x,)),
    "log1p": Function(_np("log1p"), 1, "float", lambda x, y: (1.0 / (x + 1.0),)),
    "sin": Function(_np("sin"), 1, "float", lambda x, y: (call("cos", x),)),
    "cos": Function(_np("cos"), 1, "float", lambda x, y: (-call("sin", x),)),
    "tan": Function(_np("tan"), 1, "float", lambda x, y: (1.0 + y * y,), True),
    "asin": Function(_np("arcsin"), 1, "float", lambda x, y: (call("rsqrt", 1.0 - x * x),)),
    "acos": Function(_np("arccos"), 1, "float", lambda x, y: (-call("rsqrt", 1.0 - x * x),)),
    "atan": Function(_np("arctan"), 1, "float", lambda x, y: (1.0 / (1.0 + x * x),)),
    "sinh": Function(_np("sinh"), 1, "float", lambda x, y: (call("cosh", x),)),
    "cosh": Function(_np("cosh"), 1, "float", lambda x, y: (call("sinh", x),)),
    "tanh": Function(_np("tanh"), 1, "float", lambda x, y: (1.0 - y * y,), True),
    "asinh": Function(_np("arcsinh"), 1, "float", lambda x, y: (call("rsqrt", x * x + 1.0),)),
    "acosh": Function(_np("arccosh"), 1, "float", lambda x, y: (call("rsqrt", x * x - 1.0),)),
    "atanh": Function(_np("arctanh"), 1, "float", lambda x, y: (1.0 / (1.0 - x * x),)),
    "sigmoid": Function(_scipy("expit"), 1, "float", lambda x, y: (y * (1.0 - y),), True),
    "relu": Function(_relu, 1, "same", lambda x, y: (where(y > 0, 1.0, 0.0),), True),
    "erf": Function(_scipy("erf"), 1, "float", lambda x, y: (_TWO_OVER_SQRT_PI * call("exp", -(x * x)),)),
    "isnan": Function(_np("isnan"), 1, "bool"),
    "isinf": Function(_np("isinf"), 1, "bool"),
    "eq": Function(_np("equal"), 2, "bool"),
    "ne": Function(_np("not_equal"), 2, "bool"),
    "lt": Function(_np("less"), 2, "bool", symbol="<"),
    "le": Function(_np("less_equal"), 2, "bool", symbol="<="),
    "gt": Function(_np("greater"), 2, "bool", symbol=">"),
    "ge": Function(_np("greater_equal"), 2, "bool", symbol=">="),
    "and": Function(_np("logical_and"), 2, "bool"),
    "or": Function(_np("logical_or"), 2, "bool"),
    "xor": Function(_np("logical_xor"), 2, "bool"),
    "not": Function(_np("logical_not"), 1, "bool"),
    "bitand": Function(_np("bitwise_and"), 2),
    "bitor": Function(_np("bitwise_or"), 2),
    "bitxor": Function(_np("bitwise_xor"), 2),
    "bitnot": Function(_np("invert"), 1),
    "shiftleft": Function(_np("left_shift"), 2),
    "shiftright": Function(_np("right_shift"), 2),
    # clip(x, low, high): no gradient flows to the bounds.
    "clip": Function(_np("clip"), 3, "same", lambda x, lo, hi, y: (_inside(lo, hi, y), None, None), True),
    # where(condition, a, b): the condition is boolean, the result has the promoted type of a and b.
    "where": Function(_where, 3, "same", lambda c, a, b, y: (None, where(c, 1.0, 0.0), where(c, 0.0, 1.0))),
}


def as_expr(value: Expr | Scalar) -> Expr:
    """A literal as an expression; an expression as itself."""
    return value if isinstance(value, Expr) else Const(value)


def _is(value: Expr, literal: float) -> bool:
    return isinstance(value, Const) and value.value == literal


def call(function: str, *args: Expr | Scalar) -> Expr:
    """A function of expressions."""
    return Call(function, tuple(as_expr(arg) for arg in args))


_FOLDED: dict[str, Callable[..., Scalar]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}


def simplify(expr: Expr, args: Sequence[DType]) -> Expr:
    """The expression with the arithmetic that needs no element done at once; no part changes its element type."""
    memo: dict[Expr, Expr] = {}
    before = infer_dtypes(args, expr)
    types: dict[Expr, DType | None] = dict(before)
    for part in subexpressions(expr):
        memo[part] = part
        if not isinstance(part, Call):
            continue
        plain = Call(part.function, tuple(memo[arg] for arg in part.args))
        types[plain] = _call_dtype(plain, [types[arg] for arg in plain.args])
        if types[plain] != before[part]:  # a literal took the place of what had set the type
            continue
        memo[part] = plain
        simpler = _simpler(plain)
        if simpler is None:
            continue
        types.setdefault(simpler, infer_dtypes(args, simpler)[simpler])
        wanted = before[part]
        literal = types[simpler] is None and part != expr and (wanted is None or wanted.is_float)
        if types[simpler] == wanted or literal:
            memo[part] = simpler
    return memo[expr]


def _simpler(part: Call) -> Expr | None:
    """An equal expression with less to do (where nothing is infinite or NaN times zero), or None."""
    function, parts = part.function, part.args
    if function in _FOLDED and all(isinstance(arg, Const) for arg in parts):
        return Const(_FOLDED[function](*(arg.value for arg in parts if isinstance(arg, Const))))
    if function == "mul":
        simpler = _simpler_product(*parts)
        return simpler if simpler is not None else _simpler_product(*parts[::-1])
    if function in ("add", "sub") and _is(parts[1], 0):
        return parts[0]
    if function == "add" and _is(parts[0], 0):
        return parts[1]
    if function == "sub" and _is(parts[0], 0):
        return Call("neg", (parts[1],))
    if function in ("div", "pow") and _is(parts[1], 1):
        return parts[0]
    if function == "pow" and _is(parts[1], 2):
        return Call("square", (parts[0],))
    if function == "neg" and isinstance(parts[0], Call) and parts[0].function == "neg":
        return parts[0].args[0]
    if function == "where" and parts[1] == parts[2]:
        return parts[1]
    return None


def _simpler_product(one: Expr, other: Expr) -> Expr | None:
    if _is(one, 1):
        return other
    if _is(one, -1):
        return Call("neg", (other,))
    if _is(one, 0):
        return Const(0.0)
    if isinstance(one, Call) and one.function == "where" and all(_is(x, 0) or _is(x, 1) for x in one.args[1:]):
        # other · where(c, 1, 0) is where(c, other, 0)
        return Call("where", (one.args[0], *(other if _is(x, 1) else Const(0.0) for x in one.args[1:])))
    return None


def where(condition: Expr, a: Expr | Scalar, b: Expr | Scalar) -> Expr:
    """`a` where the condition holds, else `b`."""
    return call("where", condition, a, b)


def cast(x: Expr, dtype: DType | str) -> Expr:
    """`x` converted to an element type."""
    return Call(as_dtype(dtype).name, (x,))


def relu(x: Expr) -> Expr:
    """max(x, 0)."""
    return call("relu", x)


def exp(x: Expr) -> Expr:
    """e to the x."""
    return call("exp", x)


def log(x: Expr) -> Expr:
    """Natural logarithm."""
    return call("log", x)


def sqrt(x: Expr) -> Expr:
    """Square root."""
    return call("sqrt", x)


def rsqrt(x: Expr) -> Expr:
    """1 / sqrt(x)."""
    return call("rsqrt", x)


def tanh(x: Expr) -> Expr:
    """Hyperbolic tangent."""
    return call("tanh", x)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x))."""
    return call("sigmoid", x)


def erf(x: Expr) -> Expr:
    """The error function."""
    return call("erf", x)


def maximum(a: Expr | Scalar, b: Expr | Scalar) -> Expr:
    """The larger one."""
    return call("max", a, b)


def minimum(a: Expr | Scalar, b: Expr | Scalar) -> Expr:
    """The smaller one."""
    return call("min", a, b)


def clip(x: Expr, low: Expr | Scalar, high: Expr | Scalar) -> Expr:
    """`x` limited to [low, high]; its gradient is 1 strictly inside and 0 elsewhere."""
    return call("clip", x, low, high)


def substitute(expr: Expr, args: Sequence[Expr]) -> Expr:
    """The expression with a0, a1, … replaced."""
    memo: dict[Expr, Expr] = {}

    def go(part: Expr) -> Expr:
        if isinstance(part, Arg):
            return args[part.index]
        if not isinstance(part, Call):
            return part
        if part not in memo:
            memo[part] = call(part.function, *(go(arg) for arg in part.args))
        return memo[part]

    return go(expr)


def subexpressions(*exprs: Expr) -> Iterator[Expr]:
    """Every distinct part, arguments before what uses them."""
    seen: set[Expr] = set()

    def go(part: Expr) -> Iterator[Expr]:
        if part in seen:
            return
        if isinstance(part, Call):
            for arg in part.args:
                yield from go(arg)
        seen.add(part)
        yield part

    for expr in exprs:
        yield from go(expr)


def used_args(*exprs: Expr) -> tuple[int, ...]:
    """Indices of the arguments that are read, ascending."""
    return tuple(sorted({part.index for part in subexpressions(*exprs) if isinstance(part, Arg)}))


def scalar_flops(*exprs: Expr) -> int:
    """Scalar operations an element, conversions not counted."""
    return sum(isinstance(part, Call) and part.function in FUNCTIONS for part in subexpressions(*exprs))


def promote(a: DType, b: DType) -> DType:
    """The element type of an operation on two: floats win over integers, and the wider over the narrower."""
    if a == b:
        return a
    if a.is_float and b.is_float:
        return FLOAT32 if a.itemsize == b.itemsize else max(a, b, key=lambda dtype: dtype.itemsize)
    if a.is_float or b.is_float:
        return a if a.is_float else b
    return as_dtype(np.promote_types(a.numpy, b.numpy))


def infer_dtypes(args: Sequence[DType], *exprs: Expr) -> dict[Expr, DType | None]:
    """The element type of every part; None for a literal that has met nothing yet.

    Raises:
        ShapeError: an argument index has no argument, or a condition is not boolean.
    """
    types: dict[Expr, DType | None] = {}
    for part in subexpressions(*exprs):
        if isinstance(part, Arg):
            if part.index >= len(args):
                raise ShapeError(f"the expression reads a{part.index}, and only {len(args)} inputs are given")
            types[part] = args[part.index]
        elif isinstance(part, Call):
            types[part] = _call_dtype(part, [types[arg] for arg in part.args])
        else:
            types[part] = None
    return types


def _call_dtype(part: Call, args: Sequence[DType | None]) -> DType | None:
    if part.function in DTYPES:
        return DTYPES[part.function]
    rule = FUNCTIONS[part.function].result
    if rule == "bool":
        return BOOL
    if part.function == "where":
        if args[0] not in (BOOL, None):
            raise ShapeError(f"where() needs a boolean condition, and got {args[0]}")
        args, literals = args[1:], part.args[1:]
    else:
        literals = part.args
    known = [dtype for dtype in args if dtype is not None]
    if not known:
        return FLOAT32 if rule == "float" else None
    result = known[0]
    for dtype in known[1:]:
        result = promote(result, dtype)
    has_fraction = any(isinstance(x, Const) and isinstance(x.value, float) for x in literals)
    if not result.is_float and (rule == "float" or (has_fraction and result != BOOL)):
        return FLOAT32
    if result == BOOL and any(isinstance(x, Const) and not isinstance(x.value, bool) for x in literals):
        return FLOAT32 if has_fraction else INT64
    return result


def derivative(expr: Expr, cotangent: Expr, output: Expr) -> dict[int, Expr]:
    """Cotangents of the arguments, by reverse accumulation through the expression.

    Args:
        expr: y = expr(a0, a1, …).
        cotangent: of y.
        output: stands for y itself where the root's derivative can be had from it, so that what y was computed
            from need not be kept (ReLU from its output, exp, tanh, sigmoid, square root).

    Returns:
        Argument index → expression; an argument through which nothing flows is absent.

    Raises:
        ShapeError: the expression is not differentiable in one of its parts.
    """
    order = [part for part in subexpressions(expr) if isinstance(part, Call)]
    flowing: dict[Expr, Expr] = {expr: cotangent}
    for part in reversed(order):
        incoming = flowing.pop(part, None)
        if incoming is None:
            continue
        for arg, outgoing in _pull_back(part, incoming, output if part == expr else part):
            flowing[arg] = flowing[arg] + outgoing if arg in flowing else outgoing
    return {part.index: flow for part, flow in flowing.items() if isinstance(part, Arg) and not _is(flow, 0)}


def _pull_back(part: Call, incoming: Expr, output: Expr) -> Iterator[tuple[Expr, Expr]]:
    if part.function in DTYPES:
        if DTYPES[part.function].is_float:
            yield part.args[0], incoming  # the caller converts to each argument's own type
        return
    function = FUNCTIONS[part.function]
    if function.partials is None:
        return  # comparisons and logic: constant almost everywhere
    y = output if function.uses_output else part
    for arg, partial in zip(part.args, function.partials(*part.args, y)):
        if partial is None or isinstance(arg, Const):
            continue
        yield arg, as_expr(partial) * incoming


_OPERATORS: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}


def parse_expr(text: str) -> Expr:
    """The expression that `str` writes; nothing is evaluated.

    Raises:
        ModelError: the text is not an expression.
    """
    try:
        return _from_ast(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ModelError(f"{text!r} is not a scalar expression: {error}") from None


def _from_ast(node: ast.expr) -> Expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return Const(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _from_ast(node.operand)
        if isinstance(inner, Const):
            return Const(-inner.value)
    if isinstance(node, ast.Name):
        if node.id in ("nan", "inf"):
            return Const(float(node.id))
        if node.id[:1] == "a" and node.id[1:].isdigit():
            return Arg(int(node.id[1:]))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return Call(_OPERATORS[type(node.op)], (_from_ast(node.left), _from_ast(node.right)))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        return Call(_OPERATORS[type(node.ops[0])], (_from_ast(node.left), _from_ast(node.comparators[0])))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = node.func.id.rstrip("_")
        arity = 1 if function in DTYPES else FUNCTIONS[function].arity if function in FUNCTIONS else -1
        if arity == len(node.args):
            return Call(function, tuple(_from_ast(arg) for arg in node.args))
    raise ValueError(f"cannot read {ast.unparse(node)!r}")
