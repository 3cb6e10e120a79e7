"""What the stages of a job keep together, as one checkpoint has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from foreplan.graph import TensorType
from foreplan.graph.shard import Shard
from foreplan.lower.program import PARAMETERS, Program, Slot, region_of
from foreplan.runtime.engine import Place
from foreplan.runtime.world.places import ByRank
from foreplan.runtime.world.world import World


class StagePlace(ByRank):
    """A tensor of one stage, which all ranks read at the same time.

    Attributes:
        type: of the tensor.
    """

    def __init__(self, inner: Place | None, type: TensorType, holder: int, stages: World) -> None:
        """
        Args:
            inner: where it lies, on the ranks of the stage that holds it.
            holder: that stage.
            stages: the ranks that have the same number in their stages as this one.
        """
        self.inner, self.type, self.holder, self.stages = inner, type, holder, stages

    def read(self) -> np.ndarray:
        """From the stage that holds it."""
        whole = np.empty(self.type.size, self.type.dtype.numpy)
        if self.inner is not None:
            whole[...] = self.inner.read().reshape(-1)
        content = whole.view(np.uint8)
        self.stages.begin("broadcast", self.holder, content.copy(), content)()
        return whole.reshape(self.type.shape)

    def write(self, array: np.ndarray) -> None:
        """Where it lies."""
        if self.inner is not None:
            self.inner.write(array)


def stages_of(world: World, program: Program) -> World:
    """The ranks of one number in all stages, in the order of stages."""
    return world.group(world.size // program.of_stage, program.of_stage)


def of_all_stages(stages: World, tensors: Mapping[str, tuple[Slot, Place]]) -> dict[str, tuple[Slot, Place]]:
    """What all stages keep, by name, given what this one does; of a tensor in several, that of the first. All ranks
    call it at the same time, with `stages_of` them.
    """
    own = {name: replace(slot, init=None) for name, (slot, _) in tensors.items()}
    found: dict[str, tuple[Slot, Place]] = {}
    for stage, slots in enumerate(stages.gather(own)):
        for name, slot in slots.items():
            if name not in found:
                inner = tensors[name][1] if stage == stages.rank else None
                found[name] = slot, StagePlace(inner, slot.operand.type, stage, stages)
    return found


def held_by_stages(stages: World, program: Program) -> tuple[Mapping[str, Shard | None], ...]:
    """By stage, how the weights are cut that it has, by name. All ranks call it at the same time, with `stages_of`
    them.
    """
    return tuple(
        stages.gather({slot.name: slot.shard for slot in program.tensors if region_of(slot.kind) == PARAMETERS})
    )


def of_other_stages(stages: World, names: Iterable[str]) -> set[str]:
    """Names that other stages keep, and this one does not. All ranks call it at the same time."""
    own = set(names)
    return set().union(*stages.gather(own)) - own
