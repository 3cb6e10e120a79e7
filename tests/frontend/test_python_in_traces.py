"""What Python's own operations do with traced tensors: they compute what they compute of numbers, or refuse."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ForeplanError
from foreplan.graph import Graph
from tests.drawn_python import GRID, check_numbers, compiled, drawn
from tests.ops.check import evaluate
from tests.profile import pick

A, B = np.array(GRID, np.float32).T.copy()


def _traced(text: str) -> Graph | None:
    """The graph of a text; None: it is refused."""
    try:
        return fp.trace(compiled(text, np.where), fp.spec(A.shape), fp.spec(B.shape))
    except (TypeError, ValueError, ArithmeticError, ForeplanError):
        return None


def test_drawn_python_is_right_or_refused() -> None:
    right = refused = 0
    count = pick(200, 200, 600)
    for seed in range(count):
        text = drawn(seed, literal_on_one_side=False)
        graph = _traced(text)
        refused += graph is None
        if graph is not None:
            values = evaluate(graph, dict(zip((value.name for value in graph.inputs), (A, B))))
            check_numbers(text, values[graph.outputs["output"]].astype(np.float64), 1e-5)
            right += 1
    assert min(right, refused) > count / 6


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.standard_normal(4),  # noqa: NPY002
        random.random,
        lambda: np.random.randint(3),  # noqa: NPY002
        lambda: np.random.permutation(4),  # noqa: NPY002
    ],
)
def test_numbers_drawn_while_tracing_are_said_to_be_constants(draw: Callable[[], object]) -> None:
    notes = fp.trace(lambda x: x * draw(), fp.spec((4,))).notes
    assert len(notes) == 1 and "the same in every step" in notes[0] and "nn.dropout" in notes[0]
    fixed = np.random.default_rng(0).standard_normal(4)
    assert not fp.trace(lambda x: fp.nn.dropout(x * fixed), fp.spec((4,))).notes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("fn", "number"),
    [
        (lambda x: x + 1e300, "1e+300"),
        (lambda x: np.where(x > 0, x, -1e300), "-1e+300"),
        (lambda x: x * np.array([1.0, 2e300, np.inf, np.nan]), "2e+300"),
        (lambda x: x - [1e39, 0.0, 0.0, 0.0], "1e+39"),
        (lambda x: np.maximum(x, np.float64(-1e300)), "-1e+300"),
        (lambda x: x + 10**300, "1e+300"),
    ],
)
def test_numbers_that_count_as_infinity_are_told(fn: Callable[[Any], Any], number: str, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (note,) = fp.trace(fn, fp.spec((4,), dtype)).notes
    assert note.startswith(f"{number} in the function is beyond {dtype}, and counts as infinity (test_python_in_traces")
    assert not fp.trace(fn, fp.spec((4,), "float64")).notes


def test_infinity_itself_and_the_largest_numbers_need_no_word() -> None:
    largest = float(np.finfo(np.float32).max)
    graph = fp.trace(lambda x: x + np.inf - largest + np.array([np.inf, -np.inf, np.nan, -largest]), fp.spec((4,)))
    assert not graph.notes


@pytest.mark.parametrize("content", [1e300, -1e39, np.array([0.0, 1e300]), np.array([1e39, np.nan])])
def test_a_parameter_holds_no_number_beyond_its_type(content: Any) -> None:
    with pytest.raises(fp.UsageError, match="the content of the parameter 'w' is too large"):
        fp.trace(lambda x: x * fp.nn.parameter("w", (2,), content), fp.spec((2,)))
    fp.trace(lambda x: x * fp.nn.parameter("w", (2,), content, "float64"), fp.spec((2,), "float64"))
