"""What one map of many tensors overwrites, costs and refuses; tests/sweep has its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.multi_map import MultiMap
from tests.ops.check import type_of

RNG = np.random.default_rng(0)
SIZES = (5, 1, 40)
ADAM = ("(a0 - (a3 * a1))", "((0.9 * a1) + (a4 * a2))")


def operands() -> list[np.ndarray]:
    """A parameter, its state and its gradient for each size, and two scalars."""
    return [
        *(RNG.standard_normal(size) for size in SIZES for _ in range(3)),
        *(np.array(x) for x in RNG.standard_normal(2)),
    ]


def test_results_take_the_bytes_of_their_own_tensors_alone() -> None:
    types = [type_of(x) for x in operands()]
    op = MultiMap(ADAM, 3, len(SIZES))
    pairs = op.overwrites(types, op.infer(types))
    assert pairs and all(o // 2 == i // 3 for o, i in pairs) and {o for o, _ in pairs} == set(range(6))


def test_cost_is_that_of_all() -> None:
    types = [type_of(x) for x in operands()]
    op = MultiMap(ADAM, 3, len(SIZES))
    outputs = op.infer(types)
    flops = sum(op.map.cost(x, op.results(outputs, t)).flops for t, x in enumerate(op.each(types)))
    assert op.cost(types, outputs).flops == flops
    assert op.cost(types, outputs).nbytes == sum(type.nbytes for type in (*types, *outputs))


@pytest.mark.parametrize(
    "shapes",
    [
        [(5,), (5,), (5,), ()],
        [(5,), (4,), (5,), (), ()],
        [(5,), (1,), (5,), (), ()],
        [(5,), (5,), (5,), (), (1,)],
        [(5,), (5,), (5,), (), (), ()],
    ],
    ids=["too few", "other shapes", "one to be broadcast", "no scalar", "too many"],
)
def test_wrong_operands(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ShapeError):
        MultiMap(ADAM, 3, 1).infer([TensorType(FLOAT32, shape) for shape in shapes])
