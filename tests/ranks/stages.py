"""Steps in stages, each a thread, and of one process with as many micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import foreplan as fp
from foreplan.compiled import Compiled
from foreplan.graph import Graph
from tests.ranks.threads import Thread, run
from tests.ranks.training import Batch, Trained, batches_for, own_part


def compiled_stages(model: Graph, stages: int, micro_batches: int, **options: Any) -> list[Compiled]:
    """All stages of a step."""
    options = {"loss": fp.losses.cross_entropy, "target": "numpy", "ranks": stages, "stages": stages} | options
    return [fp.compile(model, stage=stage, accumulate=micro_batches, **options) for stage in range(stages)]


def trained_alone(model: Graph, micro_batches: int, steps: int = 3, **options: Any) -> tuple[Trained, list[Batch]]:
    """What one process comes to, and the batches that it has taken."""
    options = {"loss": fp.losses.cross_entropy, "target": "numpy"} | options
    compiled = fp.compile(model, accumulate=micro_batches, **options)
    samples = micro_batches * model.inputs[0].shape[0]
    batches = [own_part(batch, 0, 1, micro_batches) for batch in batches_for(compiled, samples, steps)]
    session = compiled.bind(seed=1)
    losses = [session.step(batch).loss for batch in batches]
    return Trained(losses, dict(session.stored), [], session.allocated_bytes), batches


def trained_in_stages(stages: Sequence[Compiled], batches: Sequence[Batch], poison: bool = False) -> list[Trained]:
    """What each stage comes to; each takes the inputs that it reads."""

    def job(world: Thread) -> Trained:
        compiled = stages[world.rank]
        session = compiled.bind(seed=1, poison=poison)
        names = [slot.name for slot in compiled.program.required_inputs]
        losses = [session.step({name: batch[name] for name in names}).loss for batch in batches]
        assert session.allocated_bytes == compiled.arena_bytes
        return Trained(losses, dict(session.stored), list(world.log), session.allocated_bytes)

    return run(len(stages), job)


def assert_as_alone(found: Sequence[Trained], alone: Trained, tolerance: float = 1e-5) -> None:
    """Check that stages come to what one process does, to rounding, and hold all of it between them."""
    for each in found:
        np.testing.assert_allclose(each.losses, alone.losses, rtol=2e-6)
        for name, value in each.stored.items():
            wanted = alone.stored[name].astype(np.float64)
            np.testing.assert_allclose(value.astype(np.float64), wanted, rtol=tolerance, atol=tolerance, err_msg=name)
    assert {name for each in found for name in each.stored} == set(alone.stored)
