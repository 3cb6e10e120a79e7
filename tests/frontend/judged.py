"""A traced function run by an engine, forward and backward, to compare with another judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import foreplan as fp


@dataclass(frozen=True)
class Found:
    """What an engine found.

    Attributes:
        output: of the function.
        cotangent: what the output was weighted with to give the loss.
        inputs: gradient of each floating-point array, None for the others.
        weights: content of each stored tensor, by name.
        gradients: of each parameter, by name.
    """

    output: np.ndarray
    cotangent: np.ndarray
    inputs: list[np.ndarray | None]
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def run(fn: Callable[..., Any], *arrays: np.ndarray, target: str = "numpy", seed: int = 0) -> Found:
    """One step of a function with one output: forward, and backward from a drawn cotangent."""
    graph = fp.trace(lambda *xs: fn(*xs), *(fp.spec(x.shape, x.dtype) for x in arrays))
    (output,) = graph.outputs.values()
    cotangent = np.random.default_rng(seed).standard_normal(output.shape).astype(np.float32)
    names = [value.name for value in graph.inputs]
    wanted = [name for name, x in zip(names, arrays) if x.dtype.kind == "f"]
    step = fp.compile(
        graph,
        lambda output: (output * cotangent).sum(),
        optimizer=None,
        outputs=["output"],
        gradients=wanted,
        target=target,
    )
    session = step.bind(seed=seed)
    result = session.step(dict(zip(names, arrays)))
    weights = dict(session.state_dict())
    return Found(
        result.outputs["output"],
        cotangent,
        [result.gradients.get(name) for name in names],
        weights,
        {name: array for name, array in result.gradients.items() if name not in wanted},
    )


def close(got: np.ndarray | None, expected: Any, what: str = "", tol: float = 2e-5) -> None:
    """Equal but for rounding, relative to the largest element."""
    expected = np.asarray(expected)
    assert got is not None and got.shape == expected.shape, f"{what}: {got!r} for the shape {expected.shape}"
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tol * scale, err_msg=what)
