"""Steps that accumulate gradients, for tests: a model, its data, and whether two sessions hold the same."""

from __future__ import annotations

import numpy as np

import foreplan as fp
from foreplan.graph import Graph
from foreplan.passes.optimizer import Optimizer
from foreplan.runtime.session import Session

Arrays = dict[str, np.ndarray]


def perceptron(batch: int) -> Graph:
    return fp.models.build(f"mlp:batch={batch},width=16,layers=2,inputs=12,classes=5")


def data_for(step: fp.Compiled | Session, seed: int = 0, leading: tuple[int, ...] = ()) -> Arrays:
    rng = np.random.default_rng(seed)
    given: Arrays = {}
    for slot in step.program.inputs:
        type = slot.operand.type
        if slot.init is None:
            shape = (*leading, *type.shape)
            low, high = (slot.valid or (0, 1))[:2]
            made = rng.normal(size=shape) if type.dtype.is_float else rng.integers(max(low, 0), high + 1, shape)
            given[slot.name] = made.astype(type.dtype.numpy)
    return given


def compiled(graph: Graph, optimizer: Optimizer | None = None, **options: object) -> fp.Compiled:
    return fp.compile(graph, fp.losses.cross_entropy, optimizer or fp.optim.Nesterov(0.1), **options)  # type: ignore[arg-type]


def same(a: Session, b: Session) -> bool:
    return all(a.stored[name].tobytes() == b.stored[name].tobytes() for name in a.stored)
