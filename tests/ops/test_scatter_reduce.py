"""Scattered products, minima and maxima: gradients as PyTorch's `scatter_reduce` defines them, ties included."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ModelError, ShapeError
from foreplan.graph import Array, Builder, GraphBuilder, Kind, TensorType, Value, as_dtype
from foreplan.graph.registry import op_named
from foreplan.ops.pullback import pulled_back
from foreplan.ops.scatter_reduce import ScatterReduce
from tests.ops.check import check_vjp, evaluate, refused, run_op, type_of


@pytest.mark.parametrize("how", ["mul", "min", "max"])
@pytest.mark.parametrize("inner", [3, 200])
def test_slices(how: str, inner: int) -> None:
    """Short ones and long ones; NaN wins."""
    rng = np.random.default_rng(inner)
    at, updates, base = (
        rng.integers(-5, 5, (4, 3)),
        rng.standard_normal((2, 4, 3, inner)),
        rng.standard_normal((2, 5, inner)),
    )
    updates[0, 0, 0, 0] = np.nan
    combine = {"mul": np.multiply, "min": np.minimum, "max": np.maximum}[how]
    wanted = base.copy()
    for where in np.ndindex(4, 3):
        wanted[:, at[where]] = combine(wanted[:, at[where]], updates[(slice(None), *where)])
    (found,) = run_op(ScatterReduce(1, base.shape, how), at, updates, base)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("how", ["min", "max"])
def test_equal_extremes_share_a_cotangent(how: str) -> None:
    """`torch.scatter_reduce(…, "amax")`: base and updates that equal the result, each the same share."""
    rng = np.random.default_rng(1)
    at, updates, base = rng.integers(0, 4, 12), rng.integers(-1, 2, (12, 3)) * 1.0, rng.integers(-1, 2, (4, 3)) * 1.0
    g = rng.standard_normal((4, 3))
    b = GraphBuilder()
    values = [b.input(f"x{i}", type_of(x)) for i, x in enumerate((at, updates, base, g))]
    y = b.apply(ScatterReduce(0, base.shape, how), *values[:3])
    flows = pulled_back(b, tuple(b.nodes), [(y, values[3])], values[1:3])
    graph = b.finish({f"y{i}": value for i, value in enumerate(flows) if value is not None})
    found = evaluate(graph, {f"x{i}": x for i, x in enumerate((at, updates, base, g))})
    d_updates, d_base = np.zeros_like(updates), np.zeros_like(base)
    for row, column in np.ndindex(*base.shape):
        listed = [base[row, column], *updates[at == row, column]]
        best = max(listed) if how == "max" else min(listed)
        share = g[row, column] / listed.count(best)
        d_base[row, column] = share * (base[row, column] == best)
        d_updates[at == row, column] = share * (updates[at == row, column] == best)
    for flow, wanted in zip(flows, (d_updates, d_base)):
        assert flow is not None
        np.testing.assert_allclose(found[flow], wanted, rtol=1e-12)


def test_factors_that_are_zero_have_gradients() -> None:
    """No zero, one in the base, one among the updates, and two."""
    rng = np.random.default_rng(2)
    at, updates, base = np.array([0, 1, 1, 2, 3, 3, 3]), rng.standard_normal((7, 2)), rng.standard_normal((4, 2))
    base[1] = updates[3] = updates[4:6] = 0

    def build(b: Builder, updates: Value, base: Value) -> Value:
        known = b.store("at", type_of(at), Kind.CONSTANT, Array(at))
        return b.apply(ScatterReduce(0, (4, 2), "mul"), known, updates, base)

    check_vjp(build, updates, base)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="mul, min, max"):
        op_named("scatter_reduce", axis=0, shape=(2,), how="add")
    refused("convert booleans", ScatterReduce(0, (3,), "max"), "int64[2]", "bool[2]", "bool[3]")
    with pytest.raises(ShapeError, match="takes 3 inputs"):
        ScatterReduce(0, (3,), "max").infer(
            [TensorType(as_dtype("int64"), (2,)), TensorType(as_dtype("float32"), (2,))]
        )
