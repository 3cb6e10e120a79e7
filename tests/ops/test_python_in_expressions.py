"""What Python's own operations do with expressions: they compute what they compute of numbers, or refuse."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ForeplanError, UsageError
from foreplan.graph.types import FLOAT64
from foreplan.ops.evaluate import computed
from foreplan.ops.expr import Arg, Const, Expr, as_expr, call, infer_dtypes, used_args, where
from foreplan.ops.map import Map
from tests.drawn_python import GRID, check_numbers, compiled, drawn

X, Y = Arg(0), Arg(1)
A, B = np.array(GRID).T.copy()


def _of_expressions(text: str) -> np.ndarray | None:
    """What a text gives for all of GRID by way of an expression; None: it is refused."""
    try:
        expr = as_expr(compiled(text, where)(X, Y))
        infer_dtypes([FLOAT64, FLOAT64], expr)
    except (TypeError, ValueError, ArithmeticError, ForeplanError):
        return None
    if isinstance(expr, Const) or not used_args(expr):
        return None if not isinstance(expr, Const) else np.full(len(A), expr.value, np.float64)
    return computed(Map((str(expr),)), [A, B])[0].astype(np.float64)


def test_drawn_python_is_right_or_refused() -> None:
    right = refused = 0
    for seed in range(1200):
        text = drawn(seed, literal_on_one_side=True)
        found = _of_expressions(text)
        refused += found is None
        if found is not None:
            check_numbers(text, found)
            right += 1
    assert right > 200 and refused > 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("where(x == 0.0, y, 1.0)", "where(eq(a0, 0.0), a1, 1.0)"),
        ("where(0.0 == x, y, 1.0)", "where(eq(a0, 0.0), a1, 1.0)"),
        ("where(x != 0, y, 1.0)", "where(ne(a0, 0), a1, 1.0)"),
        ("where((x == 0.0) & (y > 1), x, y)", "where(and_(eq(a0, 0.0), (a1 > 1)), a0, a1)"),
        ("where(x == np.float32(0.5), x, y)", "where(eq(a0, 0.5), a0, a1)"),
        ("where(np.float64(0.5) == x, x, y)", "where(eq(a0, 0.5), a0, a1)"),
        ("np.float32(0.5) * x", "(0.5 * a0)"),
        ("np.int64(2) - x", "(2 - a0)"),
    ],
)
def test_a_number_beside_an_expression_is_compared_with_its_value(text: str, expected: str) -> None:
    assert str(compiled(text, where)(X, Y)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "where(x == y, x, 1.0)",
        "where(x != y, x, 1.0)",
        "where(x > 0, x == y, y)",
        "call('and', x == y, x > 0)",
        "call('not', x == y)",
        "call('or', x in (y, x), x > 0)",
        "(x > 0) & (x == y)",
        "(x == y) * y",
        "y + (x != y)",
        "y - np.True_",
        "where(True, x, y)",
    ],
)
def test_the_answer_of_python_is_no_part_of_an_expression(text: str) -> None:
    with pytest.raises(UsageError, match=r'write call\("eq", x, y\)|Write call\("eq", x, y\)'):
        compiled(text, where, call=call)(X, Y)


@pytest.mark.parametrize("wrong", [None, "1.0", 1j, [1.0], np.ones(3), object()])
def test_what_is_no_number_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="is made of expressions and numbers"):
        call("add", X, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["y if x == 0.0 else x", "x != 0.0 and y or x", "y if x in (0.0, 1.0) else x", "not x"]
)
def test_python_does_not_decide_on_an_expression(text: str) -> None:
    with pytest.raises(TypeError, match="no truth value"):
        compiled(text, where)(X, Y)


def test_expressions_are_keys_by_their_structure() -> None:
    def made() -> list[Expr]:
        return [
            Arg(0),
            Arg(1),
            Const(0),
            Const(0.0),
            Const(-0.0),
            Const(False),
            X + 1,
            X + 1.0,
            1 + X,
            call("not", X > 0),
        ]

    one, other = made(), made()
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            assert (a == b) is (i == j) and (a != b) is (i != j)
    assert {a: i for i, a in enumerate(one)} == {b: i for i, b in enumerate(other)}
    assert len({*one, *other}) == len(one)
