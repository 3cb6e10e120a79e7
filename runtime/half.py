"""A program bound to a session's memory: what is given to it is written, it runs, and its results are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreplan.graph.init import generator_for
from foreplan.lower.program import Program, Slot
from foreplan.planner.plan import Plan
from foreplan.runtime.check import Poison
from foreplan.runtime.engine import Engine, Memory, Watch


class Half:
    """A bound program: the whole step, or the body or the update of one that accumulates gradients.

    Attributes:
        program: what runs.
        plan: where and when.
        bound: its calls.
        stored: where the stored values lie, by name.
    """

    def __init__(self, engine: Engine, program: Program, plan: Plan, regions: Sequence[Memory], poison: bool) -> None:
        """Bind a verified plan; with `poison`, every run is checked with poisoned memory."""
        self.program, self.plan = program, plan
        self.bound = engine.bind(program, plan, regions)
        starts, ends = dict(plan.starts), dict(plan.ends)
        self._inputs = {s.name: self.bound.place(s.operand, starts[s.operand.value]) for s in program.inputs}
        self.stored = {s.name: self.bound.place(s.operand, starts[s.operand.value]) for s in program.stored}
        self._results = {
            id(slot): self.bound.place(slot.operand, ends[slot.operand.value])
            for slot in (*program.outputs, *program.gradients, *((program.loss,) if program.loss else ()))
        }
        self._defaults = {slot.name: _default(slot) for slot in program.inputs if slot.init is not None}
        self._poison = Poison(program, plan, regions) if poison else None

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write every input: the given array, or else its default."""
        if self._poison is not None:
            self._poison.start()
        for name, place in self._inputs.items():
            place.write(arrays[name] if name in arrays else self._defaults[name])

    def run(self, watch: Watch | None = None) -> None:
        """Run the program on the inputs written; `watch`, or else the poison, sees every instruction."""
        watching = watch or self._poison
        if watching is None:
            self.bound.run()
        else:
            self.bound.run_watched(watching)

    def result(self, slot: Slot) -> np.ndarray:
        """A result of the program, which the next run overwrites."""
        return self._results[id(slot)].read()


def _default(slot: Slot) -> np.ndarray:
    """What an input is where nothing is given."""
    array = np.empty(slot.operand.type.shape, slot.operand.type.dtype.numpy)
    assert slot.init is not None
    slot.init.fill(array, generator_for(0, slot.name))
    return array
