"""A loss of weights of many shapes, Σ (w − x)⁴, for tests of optimizers."""

from __future__ import annotations

import numpy as np

from foreplan.graph import Fill, Graph, GraphBuilder, Kind, TensorType, as_dtype
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce

SHAPES = {"scalar": (), "vector": (7,), "high": (9, 4), "wide": (3, 8), "stack": (2, 3, 5)}


def quartic(dtype: str = "float32", shapes: dict[str, tuple[int, ...]] = SHAPES) -> Graph:
    """With an input `x_NAME` for each weight."""
    b, total = GraphBuilder("quartic"), None
    for name, shape in shapes.items():
        type = TensorType(as_dtype(dtype), shape)
        w, x = b.store(name, type, Kind.PARAMETER, Fill(0.0)), b.input(f"x_{name}", type)
        term = reduce(b, "sum", elementwise(b, lambda w, x: (w - x) ** 4, w, x))
        total = term if total is None else elementwise(b, lambda s, t: s + t, total, term)
    return b.finish({}, loss=total)


def weights(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    """Drawn first weights."""
    return {name: np.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


def batches(
    rng: np.random.Generator, count: int, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> list[dict[str, np.ndarray]]:
    """Drawn inputs of steps."""
    return [{f"x_{name}": np.asarray(rng.normal(size=shape)) for name, shape in shapes.items()} for _ in range(count)]
