"""A program bound to a session's memory: its inputs are written, it runs, and its results are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreplan.graph.flat import Flat
from foreplan.lower.program import Program, Slot
from foreplan.planner.plan import Plan
from foreplan.runtime.check import Poison
from foreplan.runtime.engine import At, Engine, Memory, Watch
from foreplan.runtime.inputs import default_of
from foreplan.runtime.kernel import Run
from foreplan.runtime.world import ALONE, world_here
from foreplan.runtime.world.places import place_of


class BoundProgram:
    """A bound program: the whole step, or the body or the update of one that accumulates gradients.

    Attributes:
        program: what runs.
        plan: where and when.
        bound: its calls.
        stored: where stored tensors lie, by name.
        rows: where rows of them lie, by value.
    """

    def __init__(self, engine: Engine, program: Program, plan: Plan, regions: Sequence[Memory], poison: bool) -> None:
        """Bind a verified plan; with `poison`, every run is checked with poisoned memory."""
        self.program, self.plan = program, plan
        self.bound = engine.bind(program, plan, regions)
        starts, ends = dict(plan.starts), dict(plan.ends)
        self._inputs = {s.name: self.bound.place(s.operand, starts[s.operand.value]) for s in program.inputs}
        world = world_here() if program.ranks > 1 else ALONE
        self.stored = {
            s.name: place_of(self.bound, program, s, starts[s.operand.value], world) for s in program.tensors
        }
        rows = [slot.operand for slot in program.stored if isinstance(slot.init, Flat)]
        self.rows = {row.value: self.bound.place(row, starts[row.value]) for row in rows}
        self._ahead = {
            slot.name: self.bound.ahead(_at(slot, starts), _at(first, starts))
            for slot in program.ahead
            for first in program.inputs
            if first.name == slot.name
        }
        self._written_ahead: Mapping[str, np.ndarray] | None = None
        self._results = {
            id(slot): self.bound.place(slot.operand, ends[slot.operand.value])
            for slot in (*program.outputs, *program.gradients, *((program.loss,) if program.loss else ()))
        }
        self._defaults = {slot.name: default_of(slot) for slot in program.inputs if slot.init is not None}
        self._poison = Poison(program, plan, regions) if poison else None

    def write_ahead(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the inputs of a later run into their second slots, where there are any."""
        if self._ahead:
            self._written_ahead = None
            for name, place in self._ahead.items():
                place.write(arrays[name])
            self._written_ahead = arrays

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write every input: the given array, or else its default. Inputs written ahead are moved to their place, if
        this is the same mapping, not an equal one.
        """
        if self._poison is not None:
            self._poison.start()
        ahead = arrays is self._written_ahead
        for name, place in self._inputs.items():
            if ahead and name in self._ahead:
                self._ahead[name].move()
            else:
                place.write(arrays[name] if name in arrays else self._defaults[name])
        if ahead:
            self._written_ahead = None

    def run(self, watch: Watch | None = None) -> None:
        """Run the program on the inputs written; `watch`, or else the poison, sees every instruction."""
        watching = watch or self._poison
        if watching is None:
            self.bound.run()
        else:
            self.bound.run_watched(watching)

    def fetch(self, slot: Slot, into: np.ndarray) -> Run:
        """Begin to copy a result of the last run into an array; the returned call waits for it."""
        return self._results[id(slot)].fetch(into)


def _at(slot: Slot, offsets: Mapping[int, int]) -> At:
    return slot.operand, offsets[slot.operand.value]
