"""Gradients of what is read and written at computed places: PyTorch is the judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch.nn import functional  # noqa: E402

from foreplan.graph import GraphBuilder, Value  # noqa: E402
from foreplan.ops.grid_sample import grid_sample  # noqa: E402
from foreplan.ops.pullback import pulled_back  # noqa: E402
from foreplan.ops.scatter_reduce import ScatterReduce  # noqa: E402
from tests.ops.check import evaluate, type_of  # noqa: E402

NAMES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}


def _gradients(
    build: Callable[..., Value], arrays: Sequence[np.ndarray], g: np.ndarray, wrt: Sequence[int]
) -> list[np.ndarray | None]:
    """The result, and the gradients with respect to some of the arrays."""
    b = GraphBuilder()
    given = [b.input(f"x{i}", type_of(x)) for i, x in enumerate([*arrays, g])]
    y = build(b, *given[:-1])
    flows = pulled_back(b, tuple(b.nodes), [(y, given[-1])], [given[i] for i in wrt])
    graph = b.finish({"y": y, **{f"g{i}": flow for i, flow in enumerate(flows) if flow is not None}})
    found = evaluate(graph, {f"x{i}": x for i, x in enumerate([*arrays, g])}, hard=False)
    return [found[y], *(None if flow is None else found[flow] for flow in flows)]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode, axes", [("linear", 2), ("linear", 3), ("nearest", 2), ("nearest", 3), ("cubic", 2)])
def test_grid_sample(mode: str, axes: int, padding: str, align: bool) -> None:
    rng = np.random.default_rng(axes)
    extents, positions = rng.integers(2, 6, axes), rng.integers(1, 5, axes)
    x, g = rng.standard_normal((2, 3, *extents)), rng.standard_normal((2, 3, *positions))
    grid = rng.uniform(-1.5, 1.5, (2, *positions, axes))
    tx, tg = (torch.tensor(array, requires_grad=True) for array in (x, grid))
    ty = functional.grid_sample(tx, tg, NAMES[mode], padding, align)
    ty.backward(torch.tensor(g))
    found = _gradients(lambda b, x, q: grid_sample(b, x, q, mode, padding, align), [x, grid], g, [0, 1])
    for got, wanted in zip(found, (ty.detach(), tx.grad, tg.grad)):
        assert wanted is not None
        np.testing.assert_allclose(0.0 if got is None else got, wanted.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how, name", [("mul", "prod"), ("min", "amin"), ("max", "amax")])
def test_scatter_reduce(how: str, name: str) -> None:
    """Many ties and zeros."""
    rng = np.random.default_rng(0)
    at, g = rng.integers(0, 4, 12), rng.standard_normal((4, 3))
    updates, base = rng.integers(-1, 2, (12, 3)) * 1.0, rng.integers(-1, 2, (4, 3)) * 1.0
    tb, tu = (torch.tensor(array, requires_grad=True) for array in (base, updates))
    ty = tb.scatter_reduce(0, torch.tensor(at)[:, None].expand(12, 3), tu, name, include_self=True)
    ty.backward(torch.tensor(g))
    found = _gradients(
        lambda b, at, u, base: b.apply(ScatterReduce(0, base.shape, how), at, u, base), [at, updates, base], g, [1, 2]
    )
    for got, wanted in zip(found, (ty.detach(), tu.grad, tb.grad)):
        assert got is not None and wanted is not None
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-12, atol=1e-12)
