"""What a session keeps from step to step, as its user reads and writes it by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from foreplan.base.errors import SessionError
from foreplan.graph.init import Missing, generator_for
from foreplan.graph.shard import Sharded
from foreplan.lower.program import Program, Slot
from foreplan.runtime.engine import Place
from foreplan.runtime.inputs import check_array
from foreplan.runtime.magnitudes import adapters_with_magnitudes, at_norms, write_norms
from foreplan.runtime.turn import Turn


class StoredValues(MutableMapping[str, np.ndarray]):
    """Named stored values; reading gives a copy, assigning checks shape and type and writes into the arena.

    Each is read or written whole, between steps. What several values hold at one time is what `Session.save` writes.
    The first magnitudes of adapters (DoRA) follow the weight that is written.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        places: Mapping[str, Place],
        turn: Turn,
        assigned: Callable[[str, np.ndarray], None],
    ) -> None:
        """
        Args:
            assigned: told the name and content of each value that is assigned.
        """
        self._slots, self._places, self._turn, self._assigned = slots, places, turn, assigned
        self._adapters = {each.weight: each for each in adapters_with_magnitudes(slots.values())}

    def __getitem__(self, name: str) -> np.ndarray:
        place = self._places[name]
        with self._turn.lock:
            return place.read().copy()

    def __setitem__(self, name: str, array: Any) -> None:
        if name not in self._places:
            raise SessionError(f"there is no stored value {name!r}; nothing can be added to a session")
        checked = check_array(self._slots[name], array)
        with self._turn.lock:
            following = at_norms([self._adapters[name]] if name in self._adapters else (), self._places)
            self._places[name].write(checked)
            self._assigned(name, checked)
            write_norms(following, self._places)

    def __delitem__(self, name: str) -> None:
        raise SessionError(f"{name!r} cannot be deleted: its place in the arena is part of the plan")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SessionError(
            "a session's values cannot be pickled or copied as what they are, windows onto its arena; "
            "dict(session.parameters) is a copy of them"
        )


def absent_in(program: Program) -> set[str]:
    """The stored values that have no content yet."""
    inits = ((slot.name, slot.init) for slot in program.tensors)
    return {name for name, init in inits if isinstance(init.init if isinstance(init, Sharded) else init, Missing)}


def draw(slot: Slot, seed: int, elements: np.ndarray) -> None:
    """Write the first content of a stored value."""
    assert slot.init is not None
    slot.init.fill(elements, generator_for(seed, slot.name))
