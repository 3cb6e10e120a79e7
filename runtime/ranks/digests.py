"""Digests of what a session stores, as it was drawn or read: whole tensors, of which a rank may keep a part alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from hashlib import sha256

import numpy as np

from foreplan.graph.init import Fill
from foreplan.lower.program import Slot
from foreplan.runtime.ranks.agreement import refuse_differences
from foreplan.runtime.ranks.world import World
from foreplan.runtime.stored import draw

_FEW = 5  # tensors that a message names


def checksum(array: np.ndarray) -> str:
    """The CRC-32 of an array's elements in C order, as text."""
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0:08x}"


class Digests:
    """What several values are filled with, by name. It notes nothing where there is one rank."""

    def __init__(self, world: World) -> None:
        self.world = world
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
        differ = [name for name in names if len({found[name] for found in every if name in found}) > 1]
        if differ:
            shown = [{f"the checksum of {name!r}": own[name] for name in differ[:_FEW] if name in own} for own in every]
            more = f" ({len(differ)} of {len(names)} values)" if len(differ) > _FEW else ""
            refuse_differences(f"{what}{more}", shown)
