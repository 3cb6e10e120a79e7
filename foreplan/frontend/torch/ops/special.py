"""Functions of numbers that take a formula of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.elementwise import numbers
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.ops.expr import Const, Expr, call, log, where

# Of the gamma function, by Lanczos (1964) with g = 7 and nine terms, as Godfrey (2001) gives them: off by 1e-15.
_TERMS = (
    *(0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059),
    *(12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7),
)


def _power(x: Expr, y: Expr) -> Expr:
    if isinstance(y, Const) and y.value in (0.5, -0.5, 2):
        return x * x if y.value == 2 else call("sqrt" if y.value == 0.5 else "rsqrt", x)
    return call("pow", x, y)


def _whole_power(x: Expr, y: Expr) -> Expr:
    """Of whole numbers: with a negative exponent, what is left of 1 / xⁿ without its fraction."""
    if isinstance(y, Const) and y.value >= 0:
        return _power(x, y)
    sign = where(call("eq", call("mod", y, 2), 0), 1, -1)
    fraction = where(call("eq", x, 1), 1, where(call("eq", x, -1), sign, 0))
    return where(y < 0, fraction, call("pow", x, call("max", y, 0)))


@aten("pow")
def _pow(c: Call, x: Any, y: Any) -> Tensor:
    return numbers(c, "pow", _power if c.dtype.is_float else _whole_power, x, y)


@aten("float_power")
def _float_power(c: Call, x: Any, y: Any) -> Tensor:
    return numbers(c, "pow", _power, x, y)


def _reflected(x: Expr) -> tuple[Expr, Expr, Expr]:
    """(z, the sum of terms at z, that of their derivatives), where Γ(x) or Γ(1 - x) is Γ(z + 1), and z ≥ -0.5."""
    z = where(x < 0.5, 1.0 - x, x) - 1.0
    pairs = [(each, z + float(i)) for i, each in enumerate(_TERMS) if i]
    terms, slopes = z * 0.0 + _TERMS[0], z * 0.0
    for each, at in pairs:
        terms, slopes = terms + each / at, slopes - each / (at * at)
    return z, terms, slopes


@aten("lgamma")
def _log_gamma(c: Call, x: Any) -> Tensor:
    def fn(x: Expr) -> Expr:
        z, terms, _ = _reflected(x)
        t = z + 7.5
        above = (z + 0.5) * log(t) - t + log(terms) + 0.5 * math.log(2.0 * math.pi)
        found = where(x < 0.5, math.log(math.pi) - log(call("abs", call("sin", x * math.pi))) - above, above)
        pole = call("or", call("isinf", x), call("and", x <= 0.0, call("eq", x, call("floor", x))))
        return where(pole, math.inf, found)

    return _wide(c, "lgamma", fn, x)


@aten("digamma")
def _digamma(c: Call, x: Any) -> Tensor:
    def fn(x: Expr) -> Expr:
        z, terms, slopes = _reflected(x)
        t = z + 7.5
        above = log(t) + (z + 0.5) / t - 1.0 + slopes / terms
        found = where(x < 0.5, above - math.pi / call("tan", x * math.pi), above)
        pole = call("and", x < 0.0, call("eq", x, call("floor", x)))
        return where(call("eq", x, 0.0), -1.0 / x, where(pole, math.nan, found))

    return _wide(c, "digamma", fn, x)


def _wide(c: Call, name: str, fn: Any, x: Any) -> Tensor:
    """A formula whose parts cancel out, of numbers that have the digits for it."""
    return convert(apply(name, fn, convert(c.tensor(x, c.dtype), c.dtype.wide)), c.dtype)


@aten("angle")
def _angle(c: Call, x: Any) -> Tensor:
    return numbers(c, "angle", lambda x: where(call("isnan", x), x, where(x < 0.0, math.pi, 0.0)), x)


@aten("signbit")
def _signbit(c: Call, x: Any) -> Tensor:
    given = c.tensor(x)
    if not given.value.dtype.is_float:
        return apply("signbit", lambda x: x < 0, given)
    return apply("signbit", lambda x: where(call("eq", x, 0.0), 1.0 / x < 0.0, x < 0.0), given)


@aten("linspace")
def _linspace(c: Call, start: Any, end: Any, steps: int, **_: Any) -> Any:
    """From both ends to the middle; of whole numbers, whose ends are whole, without the fractions."""
    first, last = (convert(c.tensor(x, c.dtype), "float64" if not c.dtype.is_float else c.dtype) for x in (start, end))
    step: Any = (last - first) / float(max(1, steps - 1))
    at = np.arange(steps)
    up, down = first + step * at.astype(step.dtype), last - step * (steps - 1 - at).astype(step.dtype)
    return convert(np.where(at < (steps + 1) // 2 if steps == 1 else at < steps / 2, up, down), c.dtype)
