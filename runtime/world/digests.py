"""Digests of what a session stores, as it was drawn or read: whole tensors, of which a rank may keep a part alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256

import numpy as np

from foreplan.graph.init import Fill
from foreplan.lower.program import Slot
from foreplan.runtime.stored_values import draw
from foreplan.runtime.world.agreement import refuse_differences
from foreplan.runtime.world.world import World


def checksum(array: np.ndarray) -> str:
    """The CRC-32 of an array's elements in C order, as text."""
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0:08x}"


class Digests:
    """What several values are filled with, by name. It notes nothing where there is one rank."""

    def __init__(self, world: World, of_stage: int = 0) -> None:
        """
        Args:
            of_stage: how many neighbouring ranks have values of the same names; 0: all.
        """
        self.world, self._of_stage = world, of_stage or world.size
        self.found: dict[str, str] = {}

    def noting(self, name: str, make: Callable[[np.ndarray], object]) -> Callable[[np.ndarray], object]:
        """A function that fills an array as another one does, and notes its checksum."""
        if self.world.size == 1:
            return make

        def fill(elements: np.ndarray) -> None:
            make(elements)
            self.found[name] = checksum(elements)

        return fill

    def drawing(self, slot: Slot, seed: int) -> Callable[[np.ndarray], object]:
        """A function that draws the first content of a stored value, and notes it; one number everywhere, by itself."""
        make = partial(draw, slot, seed)
        if not isinstance(slot.init, Fill):
            return self.noting(slot.name, make)
        self.found[slot.name] = str(slot.init)
        return make

    def agree(self, what: str) -> None:
        """Check that all ranks have filled values of the same name with the same elements; those of other stages may
        have others. All of them call this at the same time.

        Args:
            what: they were filled with, for an error.

        Raises:
            SessionError: they have not.
        """
        if self.world.size == 1:
            return
        text = "\n".join(f"{name} {found}" for name, found in sorted(self.found.items()))
        if len(set(self.world.gather(sha256(text.encode()).hexdigest(), what))) == 1:
            return
        every = self.world.gather(self.found, f"{what}, by name")
        names = dict.fromkeys(name for found in every for name in found)
        differ = [name for name in names if self._differs([found.get(name) for found in every])]
        facts: list[dict[str, object]] = [{} for _ in every]
        for rank, own in enumerate(facts):
            first = rank // self._of_stage * self._of_stage
            for name in differ:
                here = any(name in found for found in every[first : first + self._of_stage])
                own[f"the checksum of {name!r}"] = every[rank].get(name, "nothing" if here else None)
        refuse_differences(what, facts)

    def _differs(self, found: Sequence[str | None]) -> bool:
        """Whether ranks have filled a value with other elements than others, or one of a stage has and another not."""
        stages = [found[first : first + self._of_stage] for first in range(0, len(found), self._of_stage)]
        return len({*found} - {None}) > 1 or any(len(set(stage)) > 1 for stage in stages)
