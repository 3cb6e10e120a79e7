"""What a `map` is in PyTorch: one activation where it is one, else an op for each call of its expression."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from foreplan.eager.autograd import Tape
from foreplan.eager.rules import elementwise as ops
from foreplan.eager.storage import Tensor
from foreplan.graph.types import BOOL, DTYPES, FLOAT32
from foreplan.ops import expr as ex
from foreplan.ops.expr import Arg, Call, Const, Expr

X, C = Arg(0), Const(0.0)  # any number stands for C
_SOFTPLUS = ex.maximum(X, C) + ex.call("log1p", ex.exp(-ex.call("abs", X)))
# The expressions of functions that PyTorch has an op for.
ACTIVATIONS: tuple[tuple[str, Expr], ...] = (
    ("hardtanh", ex.clip(X, C, C)),
    ("leaky_relu", ex.where(X > C, X, C * X)),
    ("elu", ex.where(X > C, X, C * ex.call("expm1", ex.minimum(X, C)))),
    ("elu", C * ex.where(X > C, X, C * ex.call("expm1", ex.minimum(X, C)))),
    ("silu", X * ex.sigmoid(X)),
    ("softplus", _SOFTPLUS),
    ("mish", X * ex.tanh(_SOFTPLUS)),
    ("hardsigmoid", ex.clip(X * C + C, C, C)),
    ("hardswish", X * ex.clip(X * C + C, C, C)),
    ("gelu", C * X * (C + ex.erf(X * C))),
    ("gelu", C * X * (C + ex.tanh(C * (X + C * (X * X * X))))),
)
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "isnan", "isinf"}
_WITH_NUMBER = {"mul": "mul_scalar", "div": "div_scalar", "max": "clamp_min", "min": "clamp_max", "pow": "pow"}


def apply(tape: Tape, text: str, operands: Sequence[Tensor], in_place: bool = False) -> Tensor:
    """The result of one expression of a map.

    Args:
        text: the expression.
        operands: a0, a1, …
        in_place: it is a ReLU that writes over its input.
    """
    expr = ex.parse_expr(text)
    if (name := activation(text)) is not None:
        return ops.unary(tape, name, operands[0], in_place and name == "relu")
    found = _Walk(tape, operands).value(expr)
    if isinstance(found, Tensor):
        return found
    return tape.new(operands[0].shape if operands else (), FLOAT32, "full")


@lru_cache(maxsize=4096)
def activation(text: str) -> str | None:
    """The activation that an expression is, by PyTorch's name of its op."""
    expr = ex.parse_expr(text)
    if isinstance(expr, Call) and expr.function == "relu" and expr.args == (X,):
        return "relu"
    return next((name for name, form in ACTIVATIONS if _same(expr, form)), None)


def _same(expr: Expr, form: Expr) -> bool:
    """Whether an expression has a form, whatever its numbers are."""
    if isinstance(form, Const):
        return isinstance(expr, Const)
    if isinstance(form, Arg) or not isinstance(form, Call):
        return expr == form
    if not isinstance(expr, Call) or expr.function != form.function or len(expr.args) != len(form.args):
        return False
    return all(_same(a, b) for a, b in zip(expr.args, form.args))


class _Walk:
    """An expression, call by call; a call that stands in several places is made once."""

    def __init__(self, tape: Tape, operands: Sequence[Tensor]) -> None:
        self.tape, self.operands = tape, operands
        self.known: dict[Expr, Tensor | float] = {}

    def value(self, expr: Expr) -> Tensor | float:
        """A tensor, or a number."""
        if isinstance(expr, Const):
            return float(expr.value)
        if isinstance(expr, Arg):
            return self.operands[expr.index]
        assert isinstance(expr, Call)
        if expr not in self.known:
            args = [self.value(arg) for arg in expr.args]
            self.known[expr] = self.call(expr.function, args)
        return self.known[expr]

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
