"""Steps of several ranks, and of one process on all of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import foreplan as fp
from foreplan.compiler.compiled import Compiled
from foreplan.graph import Graph
from tests.ranks.kept import compiled_once, once
from tests.ranks.threads import Thread, run

Batch = dict[str, np.ndarray]

# Of optimizers that divide by the sizes of gradients. Gradients that are roundings alone, such as those of the biases
# of keys, move nothing then; with the usual 1e-8 they move a weight nearly as other gradients do.
EPSILON = 1e-4


@dataclass
class Trained:
    """What one rank came to.

    Attributes:
        losses: of each step.
        stored: everything that a checkpoint holds, afterwards.
        log: its exchanges.
        allocated: bytes of its arena.
    """

    losses: list[float]
    stored: dict[str, np.ndarray]
    log: list[tuple[int, str, int, int, int]]
    allocated: int


def batches_for(compiled: Compiled, samples: int, steps: int, labels: int = 10, seed: int = 3) -> list[Batch]:
    """Random inputs for so many samples: floats, or labels."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        batch = {}
        for slot in compiled.program.required_inputs:
            shape, is_float = (samples, *slot.operand.type.shape[1:]), slot.operand.type.dtype.is_float
            batch[slot.name] = rng.standard_normal(shape, np.float32) if is_float else rng.integers(0, labels, shape)
        found.append(batch)
    return found


def own_part(batch: Batch, rank: int, ranks: int, accumulate: int = 1) -> Batch:
    """A rank's samples, as micro-batches if there are several."""
    found = {}
    for name, array in batch.items():
        count = len(array) // ranks
        own = array[rank * count : (rank + 1) * count]
        found[name] = own if accumulate == 1 else own.reshape(accumulate, count // accumulate, *own.shape[1:])
    return found


def trained(
    model: Any, optimizer: Any, ranks: int, samples: int, steps: int = 3, labels: int = 10, **options: Any
) -> Sequence[Trained]:
    """What each rank comes to after some steps, each with its own part of the samples, or with that of its group.

    Args:
        model: from a batch to a graph.
    """
    accumulate, alike = options.get("accumulate", 1), options.get("tensor", 1)
    options = {"loss": fp.losses.cross_entropy, "target": "numpy", "optimizer": optimizer, "ranks": ranks} | options
    graph = model(samples * alike // ranks // accumulate)
    train = partial(once, _trained) if ranks == 1 else _trained
    return train(graph, samples, steps, labels, **options)


def _trained(graph: Graph, samples: int, steps: int, labels: int, **options: Any) -> Sequence[Trained]:
    accumulate, alike, ranks = options.get("accumulate", 1), options.get("tensor", 1), options["ranks"]
    compiled = compiled_once(graph, **options)
    batches = batches_for(compiled, samples, steps, labels)

    def job(world: Thread | None) -> Trained:
        session = compiled.bind(seed=1)
        rank = 0 if world is None else world.rank
        place = rank // alike, ranks // alike, accumulate
        losses = [session.step(own_part(batch, *place)).loss for batch in batches]
        assert session.allocated_bytes == compiled.arena_bytes
        log = [] if world is None else list(world.log)
        return Trained(losses, dict(session.stored), log, session.allocated_bytes)

    return [job(None)] if ranks == 1 else run(ranks, job)


def assert_close(found: Trained, wanted: Trained, tolerance: float = 1e-4) -> None:
    """Check that one came to the same as another, to rounding; random states aside."""
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=2e-5)
    assert found.stored.keys() == wanted.stored.keys()
    for name, value in found.stored.items():
        if value.dtype.kind == "u":
            continue
        np.testing.assert_allclose(
            value.astype(np.float64), wanted.stored[name].astype(np.float64), atol=tolerance, err_msg=name
        )


def assert_same(found: Trained, wanted: Trained) -> None:
    """Check that one came to the same bits as another."""
    assert found.losses == wanted.losses
    assert found.stored.keys() == wanted.stored.keys()
    for name, value in found.stored.items():
        np.testing.assert_array_equal(value, wanted.stored[name], name)
