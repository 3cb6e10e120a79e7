"""What one rank of a job does otherwise than the others, as threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ForeplanError
from foreplan.compiler.compiled import Compiled
from tests.ranks.threads import Thread, run

MODEL = "mlp:width=8,layers=1,batch=2"
Batch = Mapping[str, Any]


@lru_cache
def step_of(ranks: int, lr: float = 0.1, **options: Any) -> Compiled:
    """A small step, which tests share."""
    loss, optimizer = fp.losses.cross_entropy, fp.optim.Momentum(lr)
    return fp.compile(fp.models.build(MODEL), loss, optimizer, target="numpy", ranks=ranks, **options)


def stages_of(ranks: int) -> Sequence[Compiled]:
    """The same model in stages."""
    return [step_of(ranks, stages=ranks, stage=stage, accumulate=2) for stage in range(ranks)]


def batch_for(compiled: Compiled, seed: int = 0, micro_batches: int = 1) -> dict[str, Any]:
    """Samples for a step."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for slot in compiled.program.required_inputs:
        shape = slot.operand.type.shape if micro_batches == 1 else (micro_batches, *slot.operand.type.shape)
        found[slot.name] = (
            rng.standard_normal(shape, np.float32) if slot.operand.type.dtype.is_float else rng.integers(0, 10, shape)
        )
    return found


def errors_of(ranks: int, job: Callable[[Thread], object]) -> list[str]:
    """The error that a job ends with on each rank; all must end with one."""

    def ending(world: Thread) -> str:
        try:
            job(world)
        except ForeplanError as error:
            return str(error)
        pytest.fail(f"rank {world.rank} ends without an error")

    return run(ranks, ending)
