"""What a graph remembers of the PyTorch module that it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class ModuleOrigin:
    """How a module's `state_dict` differs from the graph's stored values.

    Attributes:
        aliases: further names of stored values, which the module ties: that name → the stored value's.
        segments: what the module recomputes (`torch.utils.checkpoint`), as `foreplan.compile(checkpoint=…)` has it.
        unlisted: stored values that are not in it: buffers that are not persistent, and other tensors, which forward
            writes.
        constants: contents that the graph was computed with, by name: to load others would change nothing.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    segments: tuple[str, ...] = ()
    unlisted: frozenset[str] = frozenset()

    def completed(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The contents of stored values by all the names that the module has."""
        tied = {name: state[own] for name, own in self.aliases.items() if own in state}
        state = {name: array for name, array in state.items() if name not in self.unlisted}
        return {**{name: array.copy() for name, array in self.constants.items()}, **state, **tied}
