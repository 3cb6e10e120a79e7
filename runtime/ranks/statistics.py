"""Running statistics, which each rank follows by its own samples."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import numpy as np

from foreplan.graph import Kind
from foreplan.lower.program import Program
from foreplan.runtime.world.world import World


@contextmanager
def of_first_rank(program: Program, stored: MutableMapping[str, np.ndarray], world: World) -> Iterator[None]:
    """Let all ranks have the statistics of the first one, as checkpoints do, until the block ends: those of a stage
    that of the first one there. All ranks call this.

    Args:
        program: of the step that trains.
        stored: what its session stores, by name.
    """
    several = program.of_stage if program.is_stage else world.size
    names = [slot.name for slot in program.tensors if slot.kind is Kind.BUFFER] if several > 1 else []
    alike = world.group(several, 1) if several > 1 else world  # which all ranks make, whatever their stage stores
    own = {name: stored[name] for name in names}
    for name, array in own.items():
        first = np.empty_like(array)
        alike.begin("broadcast", 0, array.reshape(-1).view(np.uint8), first.reshape(-1).view(np.uint8))()
        stored[name] = first
    try:
        yield
    finally:
        stored.update(own)
