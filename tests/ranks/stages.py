"""Steps in stages, each a thread, and of one process with as many micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.compiler.compiled import Compiled
from foreplan.graph import Graph
from foreplan.runtime.session import Session
from tests.ranks.kept import compiled_once, once
from tests.ranks.threads import Thread, run
from tests.ranks.training import Batch, Trained, batches_for, own_part


def compiled_stages(model: Graph, stages: int, micro_batches: int, **options: Any) -> list[Compiled]:
    """All stages of a step."""
    options = {"loss": fp.losses.cross_entropy, "target": "numpy", "ranks": stages, "stages": stages} | options
    return [compiled_once(model, stage=stage, accumulate=micro_batches, **options) for stage in range(stages)]


def trained_alone(model: Graph, micro_batches: int, steps: int = 3, **options: Any) -> tuple[Trained, list[Batch]]:
    """What one process comes to, and the batches that it has taken."""
    return once(_trained_alone, model, micro_batches, steps, **options)


def _trained_alone(model: Graph, micro_batches: int, steps: int, **options: Any) -> tuple[Trained, list[Batch]]:
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


def trained_saved_and_read(step: Compiled, batches: Sequence[Batch], path: Path) -> tuple[float, float]:
    """The loss of a third step on a rank: of the session that took the first two and wrote a checkpoint, and of one
    that goes on from it.
    """
    names = [slot.name for slot in step.program.required_inputs]
    first, second, third = ({name: batch[name] for name in names} for batch in batches)
    session, again = step.bind(seed=1), step.bind(seed=2)
    session.step(first)
    session.step(second)
    session.save(path)
    again.load(path)
    assert again.steps_done == 2
    return session.step(third).loss, again.step(third).loss


def one_process_goes_on(graph: Graph, optimizer: Any, path: Path, batches: Sequence[Batch], alone: Trained) -> Session:
    """The session of one process that goes on from a checkpoint of two steps, after a check that it comes to what one
    comes to that has taken all three.
    """
    step = compiled_once(graph, fp.losses.cross_entropy, optimizer, target="numpy", accumulate=2)
    one = step.bind(seed=3)
    one.load(path)
    assert one.step(batches[2]).loss == pytest.approx(alone.losses[2], rel=1e-5)
    for name, value in one.stored.items():
        np.testing.assert_allclose(value.astype(float), alone.stored[name].astype(float), atol=1e-5, err_msg=name)
    return one
