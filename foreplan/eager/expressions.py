"""What a `map` is in PyTorch: one activation where it is one, else an op for each call of its expression."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from foreplan.eager.autograd import Tape
from foreplan.eager.rules import elementwise as ops
from foreplan.eager.storage import Tensor
from foreplan.graph.types import BOOL, DTYPES, FLOAT32, DType
from foreplan.ops import expr as ex
from foreplan.ops.expr import Arg, Call, Const, Expr

X, C = Arg(0), Const(0.0)  # any number stands for C
_SOFTPLUS = ex.maximum(X, C) + ex.call("log1p", ex.exp(-ex.call("abs", X)))
# The expressions of functions that PyTorch has an op for.
FORMS: tuple[tuple[str, Expr], ...] = (
    ("relu", ex.relu(X)),
    ("hardtanh", ex.clip(X, C, C)),
    ("leaky_relu", ex.where(X > C, X, C * X)),
    ("elu", ex.where(X > C, X, C * ex.call("expm1", ex.minimum(X, C)))),
    ("elu", ex.where(X > C, X, ex.call("expm1", ex.minimum(X, C)))),
    ("elu", C * ex.where(X > C, X, C * ex.call("expm1", ex.minimum(X, C)))),
    ("sqrt", ex.where(X > C, ex.call("sqrt", ex.where(X > C, X, C)), C)),  # with a derivative of zero at zero
    ("silu", X * ex.sigmoid(X)),
    ("softplus", _SOFTPLUS),
    ("mish", X * ex.tanh(_SOFTPLUS)),
    ("hardsigmoid", ex.clip(X * C + C, C, C)),
    ("hardswish", X * ex.clip(X * C + C, C, C)),
    ("gelu", C * X * (C + ex.erf(X * C))),
    ("gelu", C * X * (C + ex.tanh(C * (X + C * (X * X * X))))),
)
Form: TypeAlias = "str | tuple[Form, ...]"
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "isnan", "isinf"}
_WITH_NUMBER = {"mul": "mul_scalar", "div": "div_scalar", "max": "clamp_min", "min": "clamp_max", "pow": "pow"}


def apply(tape: Tape, text: str, operands: Sequence[Tensor], in_place: bool = False, written_out: str = "") -> Tensor:
    """The result of one expression of a map.

    Args:
        text: the expression.
        operands: a0, a1, …
        in_place: a ReLU may write over its input.
        written_out: the name of an activation that is run call by call.
    """
    text = bare(text, *(operand.dtype for operand in operands))
    if (name := activation(text)) is not None and name != written_out:
        x = operands[0]
        history = tape.records and x.needs_grad  # hardtanh saves what it takes: in place, that is a copy of its input
        return ops.unary(tape, name, x, in_place and (name == "relu" or (name == "hardtanh" and not history)))
    return together(tape, [text], operands)[0]


def together(tape: Tape, texts: Sequence[str], operands: Sequence[Tensor]) -> list[Tensor]:
    """The results of several expressions, call by call; what stands in several of them is made once."""
    found = _Walk(tape, operands, [ex.parse_expr(text) for text in texts]).results()
    shape = operands[0].shape if operands else ()
    return [each if isinstance(each, Tensor) else tape.new(shape, FLOAT32, "full") for each in found]


@lru_cache(maxsize=4096)
def bare(text: str, *dtypes: DType) -> str:
    """An expression without a cast of all of it to the type that all operands have already."""
    expr = ex.parse_expr(text)
    if isinstance(expr, Call) and {dtype.name for dtype in dtypes} == {expr.function}:
        return str(expr.args[0])
    return text


@lru_cache(maxsize=4096)
def activation(text: str) -> str | None:
    """The activation that an expression of a0 is, by PyTorch's name of its op."""
    return known_as(ex.parse_expr(text))


def known_as(expr: Expr) -> str | None:
    """The activation that an expression is, by PyTorch's name of its op."""
    size: dict[Expr, int] = {}  # with each part as often as it is read: `form` writes it out so
    for part in ex.subexpressions(expr):
        size[part] = 1 + sum(size[arg] for arg in part.args) if isinstance(part, Call) else 1
    return ACTIVATIONS.get(form(expr)) if size[expr] <= _LARGEST else None


def form(expr: Expr) -> Form:
    """What two expressions have in common that differ in numbers, and in the order of sums and products."""
    if isinstance(expr, Const):
        return "number"
    if not isinstance(expr, Call):
        return str(expr)
    args = [form(arg) for arg in expr.args]
    if expr.function == "pow" and args[1] == "number" and float(expr.args[1].value) == 3.0:  # type: ignore[attr-defined]
        return _joined("mul", [args[0]] * 3)
    if expr.function in ("add", "mul"):
        return _joined(expr.function, args)
    if expr.function in ("sub", "div") and args[1] == "number":
        return _joined("add" if expr.function == "sub" else "mul", args)
    return (expr.function, *args)


def _joined(function: str, args: list[Form]) -> Form:
    """A sum or a product of all that it is made of; several numbers are one."""
    flat: list[Form] = []
    for arg in args:
        flat += arg[1:] if isinstance(arg, tuple) and arg[0] == function else (arg,)
    numbers = ["number"] if "number" in flat else []
    return (function, *numbers, *sorted((each for each in flat if each != "number"), key=str))


ACTIVATIONS = {form(expr): name for name, expr in FORMS}
_LARGEST = 100  # those of FORMS have 18 at most, and may be written at greater length


class _Walk:
    """Expressions, call by call. What stands in several places is made once, and is dropped when all have read it."""

    def __init__(self, tape: Tape, operands: Sequence[Tensor], exprs: Sequence[Expr]) -> None:
        self.tape, self.operands, self.exprs = tape, operands, exprs
        self.known: dict[Expr, Tensor | float] = {}
        self.parts = list(dict.fromkeys(part for expr in exprs for part in ex.subexpressions(expr)))
        self.left = Counter(arg for part in self.parts if isinstance(part, Call) for arg in part.args)
        self.left.update(exprs)

    def results(self) -> list[Tensor | float]:
        """Tensors, or numbers."""
        for part in self.parts:
            if isinstance(part, Call):
                args = [self.value(arg) for arg in part.args]
                self.known[part] = self.call(part.function, args)
                for arg in part.args:
                    self.left[arg] -= 1
                    if not self.left[arg]:
                        self.known.pop(arg, None)
                del args
        return [self.value(expr) for expr in self.exprs]

    def value(self, expr: Expr) -> Tensor | float:
        """A part that has been computed."""
        if isinstance(expr, Const):
            return float(expr.value)
        return self.operands[expr.index] if isinstance(expr, Arg) else self.known[expr]

    def call(self, function: str, args: list[Tensor | float]) -> Tensor | float:
        """One call."""
        tape, tensors = self.tape, [each for each in args if isinstance(each, Tensor)]
        if not tensors:
            return 0.0
        first = tensors[0]
        if function in DTYPES:
            return ops.cast(tape, first, DTYPES[function])
        if function in _COMPARISONS:
            return ops.without_gradient(tape, function, tensors, BOOL)
        if not first.dtype.is_float and function != "where":
            return ops.without_gradient(tape, function, tensors, first.dtype)
        if function == "where":
            return self.where(args)
        if function in ("add", "sub", "mul", "div", "pow", "max", "min") and len(tensors) == 2:
            if function in ("max", "min"):
                return ops.extremum(tape, f"{function}imum", *tensors)
            two = {"add": ops.add, "sub": ops.sub, "mul": ops.mul, "div": ops.div, "pow": ops.power}
            return two[function](tape, *tensors)
        return self.of_one(function, args, first)

    def where(self, args: list[Tensor | float]) -> Tensor:
        condition, *rest = args
        assert isinstance(condition, Tensor)
        a, b = (each if isinstance(each, Tensor) else None for each in rest)
        dtype = next((each.dtype for each in (a, b) if each is not None), FLOAT32)
        return ops.select(self.tape, condition, a, b, dtype)

    def of_one(self, function: str, args: list[Tensor | float], x: Tensor) -> Tensor:
        """A function of one tensor, and of numbers."""
        tape = self.tape
        if function == "add" or (function == "sub" and args[0] is x):
            return ops.passed_on(tape, x, function)
        if function == "sub":
            return ops.unary(tape, "rsub", x)
        if function == "div" and args[0] is not x:
            return ops.unary(tape, "mul_scalar", ops.unary(tape, "reciprocal", x))
        if function == "clip":
            return ops.unary(tape, "clamp", x)
        name = _WITH_NUMBER.get(function, function)
        if name in ops.UNARY:
            return ops.unary(tape, name, x)
        return ops.unary(tape, "abs", x)  # a function that saves its input, as most do
