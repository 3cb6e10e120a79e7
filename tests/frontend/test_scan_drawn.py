"""Drawn loops against `jax.lax.scan`: carries that are swapped, passed on, integers; slices, outputs and structure."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from tests.frontend.judged import close, run
from tests.oracle.peers import jax, jnp, lax, pulled
from tests.profile import pick

Value = tuple[Any, tuple[int, ...]]  # of a step, and its shape


class Cell:
    """A drawn function of a loop: what is drawn are its choices, so that NumPy's names and JAX's make the same."""

    def __init__(self, seed: int) -> None:
        self.seed, rng = seed, Random(seed)
        self.steps, self.reverse = rng.randint(1, 6), rng.random() < 0.5
        self.carries = [self.shape(rng) for _ in range(rng.randint(1, 3))]
        self.slices = [self.shape(rng) for _ in range(rng.randint(0, 2))]
        self.fixed = [self.shape(rng) for _ in range(rng.randint(0, 2))]
        self.counts = rng.random() < 0.4

    @staticmethod
    def shape(rng: Random) -> tuple[int, ...]:
        return rng.choice([(3,), (2, 3), (4, 16), (3, 4), ()])

    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.seed)
        shapes = [*self.carries, *((self.steps, *shape) for shape in self.slices), *self.fixed]
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def __call__(self, scan: Callable[..., Any], xp: Any, *arrays: Any) -> Any:
        first, second = len(self.carries), len(self.carries) + len(self.slices)
        fixed = list(zip(arrays[second:], self.fixed))

        def cell(carry: Any, xs: Any) -> Any:
            return self.step(xp, carry, xs, fixed)

        begin = list(arrays[:first]) + ([xp.zeros((), np.int32)] if self.counts else [])
        xs = tuple(arrays[first:second])
        last, ys = scan(cell, begin, xs or None, length=None if xs else self.steps, reverse=self.reverse)
        floats = [*last[:first], *ys["y"], *([ys["n"] * 0.5] if self.counts else [])]
        return sum((xp.tanh(value * 0.5) * (i + 1)).sum() for i, value in enumerate(floats))

    def step(self, xp: Any, carry: Any, xs: Any, fixed: list[Value]) -> Any:
        """One step: a few drawn operations, then drawn next carries of the same shapes, and drawn outputs."""
        rng = Random(self.seed + 1)
        values: list[Value] = list(zip(carry, self.carries)) + list(zip(xs or (), self.slices)) + fixed
        for _ in range(rng.randint(0, 6)):
            values.append(self.operation(rng, xp, values))
        after = [self.fitting(rng, xp, values, shape) for shape in self.carries]
        if rng.random() < 0.3:
            after[0] = carry[0]
        out = {"y": [rng.choice(values)[0] for _ in range(rng.randint(0, 2))]}
        if self.counts:
            after.append(carry[-1] + 2)
            out["n"] = carry[-1]
        return after, out

    def operation(self, rng: Random, xp: Any, values: list[Value]) -> Value:
        x, shape = rng.choice(values)
        which = rng.randrange(9)
        if which == 0:
            return xp.tanh(x), shape
        if which == 1:
            y, other = rng.choice(values)
            return (x * y, shape) if other in (shape, ()) else (x * y.sum(), shape)
        if which == 2 and len(shape) == 2:
            y, other = rng.choice(values)
            if len(other) == 2 and other[0] == shape[1]:
                return x @ y * 0.3, (shape[0], other[1])
            return x @ x.T * 0.3, (shape[0], shape[0])
        if which == 3 and shape:
            return x.sum(-1), shape[:-1]
        if which == 4 and shape:
            return xp.concatenate([x[1:], x[:1] * 0.5]), shape
        if which == 5 and len(shape) == 2:
            return xp.cumsum(x, 1) * 0.5, shape
        if which == 6 and shape:
            return xp.take(x, np.array([shape[0] - 1, *range(shape[0] - 1)]), axis=0), shape
        if which == 7:
            return xp.where(x > 0.1, x * x, -0.5 * x), shape
        return xp.exp(-x * x), shape

    def fitting(self, rng: Random, xp: Any, values: list[Value], shape: tuple[int, ...]) -> Any:
        """A value of a shape."""
        alike = [value for value, other in values if other == shape]
        x, _ = rng.choice(values)
        return xp.tanh(rng.choice(alike) + x.sum() * 0.1) if rng.random() < 0.6 else rng.choice(alike)


TARGETS = ("numpy", "cpu:threads=1", "cpu:threads=2", "written out")


@pytest.mark.parametrize("seed", range(pick(4, 8, 120)))
def test_results_and_gradients_are_those_of_jax(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(seed)
    target = TARGETS[seed % len(TARGETS)]
    if target == "written out":
        monkeypatch.setattr("foreplan.compiler.pipeline.has_loops", lambda options: False)
        target = "numpy"
    arrays = cell.arrays()
    found = run(lambda *xs: cell(fp.scan, np, *xs), *arrays, target=target)
    expected, cotangents = pulled(lambda *xs: cell(lax.scan, jnp, *xs), found.cotangent, *arrays)
    close(found.output, expected)
    for i, (got, want) in enumerate(zip(found.inputs, cotangents)):
        close(got, want, f"gradient of input {i}")


@pytest.mark.parametrize("seed", range(pick(1, 4, 40)))
def test_gradients_of_gradients_are_those_of_jax(seed: int) -> None:
    """A penalty on the gradient by the first carry. The gradient's loop is differentiated, and cotangents come to what
    the first loop keeps.
    """
    cell = Cell(seed)

    def penalty(gradient: Callable[..., Any], scan: Callable[..., Any], xp: Any, *arrays: Any) -> Any:
        y = cell(scan, xp, *arrays)
        (dx,) = gradient(y, scan, xp, *arrays)
        return y + (dx * dx).sum()

    def ours(y: Any, scan: Any, xp: Any, *arrays: Any) -> Any:
        return (fp.gradient(y, arrays[0]),)

    def theirs(y: Any, scan: Any, xp: Any, *arrays: Any) -> Any:
        return (jax.grad(lambda first: cell(scan, xp, first, *arrays[1:]))(arrays[0]),)

    arrays = cell.arrays()
    found = run(lambda *xs: penalty(ours, fp.scan, np, *xs), *arrays, target=("numpy", "cpu:threads=1")[seed % 2])
    expected, cotangents = pulled(lambda *xs: penalty(theirs, lax.scan, jnp, *xs), found.cotangent, *arrays)
    close(found.output, expected)
    for i, (got, want) in enumerate(zip(found.inputs, cotangents)):
        close(got, want, f"gradient of input {i}", tol=1e-4)
