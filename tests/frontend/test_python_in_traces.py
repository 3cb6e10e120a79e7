"""What Python's own operations do with traced tensors: they compute what they compute of numbers, or refuse."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

import foreplan as fp
from foreplan.errors import ForeplanError
from foreplan.graph import Graph
from tests.drawn_python import GRID, check_numbers, compiled, drawn
from tests.ops.check import evaluate

A, B = np.array(GRID, np.float32).T.copy()


def _traced(text: str) -> Graph | None:
    """The graph of a text; None: it is refused."""
    try:
        return fp.trace(compiled(text, np.where), fp.spec(A.shape), fp.spec(B.shape))
    except (TypeError, ValueError, ArithmeticError, ForeplanError):
        return None


def test_drawn_python_is_right_or_refused() -> None:
    right = refused = 0
    for seed in range(600):
        text = drawn(seed, literal_on_one_side=False)
        graph = _traced(text)
        refused += graph is None
        if graph is not None:
            values = evaluate(graph, dict(zip((value.name for value in graph.inputs), (A, B))))
            check_numbers(text, values[graph.outputs["output"]].astype(np.float64), 1e-5)
            right += 1
    assert right > 100 and refused > 100


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
