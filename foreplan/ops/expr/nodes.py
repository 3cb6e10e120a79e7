"""Nodes of scalar expressions, the functions that build them, and walks over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from typing import Any

import numpy as np

from foreplan.base.arguments import shown
from foreplan.base.errors import UsageError
from foreplan.graph.types import DType, as_dtype

Scalar = float | int | bool

# Functions with two arguments that are written as an operator, and that operator.
INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "pow": "**",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
# and/or/not are Python keywords, so their calls are written with these names.
_TEXT_NAMES = {"and": "and_", "or": "or_", "not": "not_"}
# A part of more calls than this that is read in several places is written once in the text, under a name.
WRITTEN_AGAIN = 8


class Expr:
    """A scalar expression over arguments a0, a1, …; built with Python operators and the functions of this module.

    An expression is a directed acyclic graph: a part may be read in many places. All that is done with expressions
    takes time, memory and text in proportion to their distinct parts.

    `x == 0.0` is the expression `eq(x, 0.0)`. Of two expressions, `==` says whether they are the same, as sets and
    dicts ask: write `call("eq", x, y)` for the numbers that they stand for.
    """

    __array_ufunc__ = None  # a number of NumPy leaves the operator to the expression

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, float | int | np.generic):
            return call("eq", self, as_expr(other))
        return self is other or (isinstance(other, Expr) and self._digest == other._digest)

    def __ne__(self, other: Any) -> Any:
        return call("ne", self, as_expr(other)) if isinstance(other, float | int | np.generic) else not self == other

    def __hash__(self) -> int:
        return hash(self._digest)

    @cached_property
    def _digest(self) -> bytes:
        """16 bytes that follow from the structure: expressions with the same digest are equal."""
        raise NotImplementedError

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


@dataclass(frozen=True, eq=False)
class Arg(Expr):
    """The element of input `index`."""

    index: int

    @cached_property
    def _digest(self) -> bytes:
        return _digest_of(f"argument {self.index}")

    def __str__(self) -> str:
        return f"a{self.index}"


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """A literal. It takes the element type of the arguments beside it."""

    value: Scalar

    # In Python 1 == 1.0 == True and 0.0 == -0.0; here they are four different literals.
    @cached_property
    def _digest(self) -> bytes:
        return _digest_of(f"number {self.value!r}")

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, eq=False)
class Call(Expr):
    """A function of expressions; `function` is a key of FUNCTIONS or an element type (a conversion)."""

    function: str
    args: tuple[Expr, ...]

    def __post_init__(self) -> None:
        _ = self._digest  # while those of the arguments are known: later it takes a stack as deep as the expression

    @cached_property
    def _digest(self) -> bytes:
        return _digest_of(self.function, *(arg._digest for arg in self.args))

    def __str__(self) -> str:
        return _text(self)


def _digest_of(what: str, *args: bytes) -> bytes:
    return blake2b(b"\0".join((what.encode(), b"".join(args))), digest_size=16).digest()


def _text(whole: Call) -> str:
    """The expression as Python writes it. A large part that is read again has a name from its first place on."""
    parts = [part for part in subexpressions(whole) if isinstance(part, Call)]
    read = Counter(arg for part in parts for arg in part.args)
    calls: dict[Expr, int] = {}  # in the text of a part, where it is read again
    for part in parts:
        count = 1 + sum(calls.get(arg, 0) for arg in part.args)
        calls[part] = 0 if count > WRITTEN_AGAIN and read[part] > 1 else count
    names: dict[Expr, str] = {}
    text: list[str] = []
    left: list[Call | str | tuple[Call, int]] = [whole]  # from its end: to be written; or begun, at a place of the text
    while left:
        each = left.pop()
        if isinstance(each, str):
            text.append(each)
        elif isinstance(each, tuple):
            names[each[0]] = f"t{len(names)}"
            text[each[1]] = f"({names[each[0]]} := "
        elif each in names:
            text.append(names[each])
        else:
            args = [arg if isinstance(arg, Call) else str(arg) for arg in each.args]
            infix = each.function in INFIX and len(args) == 2
            between = f" {INFIX[each.function]} " if infix else ", "
            if not calls[each]:
                left += [")", (each, len(text))]
                text.append("")
            text.append("(" if infix else f"{_TEXT_NAMES.get(each.function, each.function)}(")
            left.append(")")
            for arg in args[:0:-1]:
                left += [arg, between]
            left += args[:1]
    return "".join(text)


def as_expr(value: Expr | Scalar | np.generic) -> Expr:
    """A number as an expression; an expression as itself.

    Raises:
        UsageError: it is True or False, which a comparison of expressions gives, or no number.
    """
    if isinstance(value, Expr):
        return value
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool):
        raise UsageError(
            f"{number} stands in an expression: `==`, `!=` and `in` between expressions say whether they are the same "
            f'expression. Write call("eq", x, y) to compare their numbers, and Const({number}) for the literal'
        )
    if not isinstance(number, int | float):
        raise UsageError(f"an expression is made of expressions and numbers, and was given {shown(value)}")
    return Const(number)


def is_literal(value: Expr, literal: float) -> bool:
    """Whether the expression is this number."""
    return isinstance(value, Const) and value.value == literal


def call(function: str, *args: Expr | Scalar) -> Expr:
    """The call of a function on expressions and numbers."""
    return Call(function, tuple(as_expr(arg) for arg in args))


def where(condition: Expr, a: Expr | Scalar, b: Expr | Scalar) -> Expr:
    """`a` where the condition holds, else `b`."""
    return call("where", condition, a, b)


def cast(x: Expr, dtype: DType | str) -> Expr:
    """`x` converted to an element type."""
    return Call(as_dtype(dtype).name, (x,))


# Functions that are called often.
relu: Callable[[Expr], Expr] = partial(call, "relu")  # max(x, 0)
exp: Callable[[Expr], Expr] = partial(call, "exp")  # e to the x
log: Callable[[Expr], Expr] = partial(call, "log")  # natural logarithm
sqrt: Callable[[Expr], Expr] = partial(call, "sqrt")  # square root
rsqrt: Callable[[Expr], Expr] = partial(call, "rsqrt")  # 1 / sqrt(x)
tanh: Callable[[Expr], Expr] = partial(call, "tanh")  # hyperbolic tangent
sigmoid: Callable[[Expr], Expr] = partial(call, "sigmoid")  # 1 / (1 + exp(-x))
erf: Callable[[Expr], Expr] = partial(call, "erf")  # the error function
maximum: Callable[[Expr | Scalar, Expr | Scalar], Expr] = partial(call, "max")  # the larger one
minimum: Callable[[Expr | Scalar, Expr | Scalar], Expr] = partial(call, "min")  # the smaller one


def clip(x: Expr, low: Expr | Scalar, high: Expr | Scalar) -> Expr:
    """`x` limited to [low, high]; its gradient is 1 strictly inside and 0 elsewhere."""
    return call("clip", x, low, high)


def substitute(expr: Expr, args: Sequence[Expr]) -> Expr:
    """The expression with a0, a1, … replaced by `args`."""
    found: dict[Expr, Expr] = {}
    for part in subexpressions(expr):
        if isinstance(part, Arg):
            found[part] = args[part.index]
        else:
            found[part] = call(part.function, *(found[arg] for arg in part.args)) if isinstance(part, Call) else part
    return found[expr]


@lru_cache(maxsize=4096)
def subexpressions(*exprs: Expr) -> tuple[Expr, ...]:
    """Every distinct part of the expressions; arguments come before the calls that use them."""
    found: dict[Expr, None] = {}
    left = list(reversed(exprs))
    while left:
        part = left[-1]
        below = [arg for arg in reversed(part.args) if arg not in found] if isinstance(part, Call) else []
        if part in found or not below:
            found[left.pop()] = None
        else:
            left += below
    return tuple(found)


@lru_cache(maxsize=4096)
def used_args(*exprs: Expr) -> tuple[int, ...]:
    """Indices of the arguments that are read, ascending."""
    return tuple(sorted({part.index for part in subexpressions(*exprs) if isinstance(part, Arg)}))
