"""Drawn texts of Python that compute with x and y: operators, comparisons, conditions, built-in functions, `math` and
NumPy. What is given an expression or a traced tensor must compute what it computes of numbers, or refuse.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest

VALUES = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
GRID = list(itertools.product(VALUES, VALUES))
_LITERALS = ("0.0", "1.0", "-0.5", "2.0", "0", "1", "True", "np.float32(0.5)", "np.float64(1.0)", "np.int64(2)")
_BINARY = ("+", "-", "*", "/", "//", "%")
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_OF_ONE = (
    "-{}",
    "({} ** 2)",
    "+{}",
    "abs({})",
    "round({})",
    "int({})",
    "float({})",
    "np.floor({})",
    "math.floor({})",
    "math.exp({})",
)
_OF_TWO = (
    "max({}, {})",
    "min({}, {})",
    "sorted([{}, {}])[0]",
    "np.maximum({}, {})",
    "math.fmod({}, {})",
    "sum([{}, {}])",
)
_TESTS = (
    "not {0} < {1}",
    "{0} < {1} < 2.0",
    "bool({0})",
    "math.isclose({0}, {1})",
    "np.isclose({0}, {1})",
    "np.isnan({0})",
    "math.isinf({0})",
    "any([{0} > 0.0, {1} > 0.0])",
    "isinstance({0}, complex)",
)


def drawn(seed: int, literal_on_one_side: bool) -> str:
    """A text. With `literal_on_one_side`, `==`, `!=` and `in` have a literal on one side wherever Python asks."""
    rng = random.Random(seed)

    def number(depth: int) -> str:
        if not depth or rng.random() < 0.15:
            return rng.choice(("x", "x", "y", rng.choice(_LITERALS)))
        kind = rng.randrange(7)
        if kind == 0:
            return f"({number(depth - 1)} {rng.choice(_BINARY)} {number(depth - 1)})"
        if kind == 1:
            return rng.choice(_OF_ONE).format(number(depth - 1))
        if kind == 2:
            return rng.choice(_OF_TWO).format(number(depth - 1), number(depth - 1))
        if kind == 3:
            return f"({number(depth - 1)} if {asked(depth - 1)} else {number(depth - 1)})"
        if kind == 4:
            return f"where({compared(depth - 1)}, {number(depth - 1)}, {number(depth - 1)})"
        if kind == 5:
            return f"where({asked(depth - 1)}, {number(depth - 1)}, {number(depth - 1)})"
        return f"(({compared(depth - 1)}) * (y - {number(depth - 1)}))"

    def compared(depth: int) -> str:
        how = rng.choice((*_COMPARISONS, "&"))
        if how == "&":
            return f"({number(depth)} < {number(depth)}) & ({number(depth)} >= {number(depth)})"
        return f"{number(depth)} {how} {number(depth)}"

    def asked(depth: int) -> str:
        kind = rng.randrange(5)
        one, other = number(depth), number(depth)
        if literal_on_one_side:
            other = rng.choice(_LITERALS)
        if kind == 0:
            return f"{one} {rng.choice(('==', '!='))} {other}"
        if kind == 1:
            return f"{one} {rng.choice(('in', 'not in'))} ({other}, 1.0)"
        if kind == 2:
            return f"{one} {rng.choice(('<', '>'))} {other}"
        if kind == 3:
            return f"({asked(depth)} {rng.choice(('and', 'or'))} {asked(depth)})"
        return rng.choice(_TESTS).format(one, number(depth))

    return number(rng.randint(1, 3))


def compiled(text: str, where: Callable[..., object], **names: object) -> Callable[..., object]:
    """A function of x and y of a text, with its `where`."""
    function: Callable[..., object] = eval(f"lambda x, y: {text}", {"where": where, "math": math, "np": np, **names})
    return function


def check_numbers(text: str, found: np.ndarray, tolerance: float = 1e-9) -> None:
    """Compare what came of a text for each pair of GRID with what Python makes of the numbers, where it makes any."""
    function = compiled(text, lambda condition, a, b: a if condition else b)
    for (x, y), value in zip(GRID, found.tolist(), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = float(function(x, y))  # type: ignore[arg-type]
            except (TypeError, ValueError, ArithmeticError):  # Python refuses it, or gives a complex number
                continue
        assert value == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True), f"{text} of {x} and {y}"
