"""A session: a verified plan bound to one arena, with the values that last from step to step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.errors import SessionError, UsageError
from foreplan.graph import Kind
from foreplan.graph.init import generator_for
from foreplan.lower.program import ARENA, PARAMETERS, Program, Slot
from foreplan.planner import verify
from foreplan.planner.plan import Plan
from foreplan.runtime.check import Poison, Timing, Trace
from foreplan.runtime.engine import Engine
from foreplan.runtime.inputs import check_array, check_inputs
from foreplan.runtime.numpy import NumpyEngine
from foreplan.units import format_bytes

ENGINES: dict[str, type[Engine]] = {"numpy": NumpyEngine}


@dataclass(frozen=True)
class Result:
    """What one step returns; copies, which stay as they are when the next step runs.

    Attributes:
        loss: the loss, or None where the program has none.
        outputs: by name.
        gradients: by parameter, where the program returns them.
    """

    loss: float | None = None
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


class Stored(MutableMapping[str, np.ndarray]):
    """Named stored values; reading gives a copy, assigning checks shape and type and writes into the arena."""

    def __init__(self, slots: Mapping[str, Slot], arrays: Mapping[str, np.ndarray]) -> None:
        self._slots, self._arrays = slots, arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name].copy()

    def __setitem__(self, name: str, array: Any) -> None:
        if name not in self._arrays:
            raise SessionError(f"there is no stored value {name!r}; nothing can be added to a session")
        np.copyto(self._arrays[name], check_array(self._slots[name], array), casting="unsafe")

    def __delitem__(self, name: str) -> None:
        raise SessionError(f"{name!r} cannot be deleted: its place in the arena is part of the plan")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Session:
    """One arena and what runs in it. Nothing that grows with the model is allocated after it was made.

    Attributes:
        program: what runs.
        plan: where and when.
        parameters: the trained values, by name.
        stored: everything that a checkpoint holds: parameters, buffers, optimizer state, step count, random state.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        *,
        seed: int = 0,
        threads: int | None = None,
        share: Session | None = None,
        poison: bool = False,
    ) -> None:
        """Verify the plan, allocate, and draw the first parameters.

        Args:
            program: from `lower`.
            plan: for that program.
            seed: of everything that is drawn; each value depends on the seed and its own name alone.
            threads: of the BLAS library, for the whole process; None leaves them as they are.
            share: another session of the same model, whose parameters and buffers this one uses in place; its
                transient memory too, where that is large enough.
            poison: overwrite dead bytes with NaN patterns and check every write. Slow; for finding bugs.

        Raises:
            UsageError: a seed or a number of threads that is none.
            VerificationError: the plan is not right for the program.
            SessionError: the sessions cannot share, or there is no memory.
        """
        if not 0 <= seed < 1 << 63:
            raise UsageError(f"a seed is a whole number from 0 to 2**63 - 1, and is {seed}")
        verify(plan, program)
        self.program, self.plan = program, plan
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be at least 1, and is {threads}")
        if threads is not None:
            from threadpoolctl import threadpool_limits

            threadpool_limits(threads)
        engine = ENGINES[program.target]()
        self.regions, self.allocated_bytes = _regions(engine, program, plan, share)
        self._bound = engine.bind(program, plan, self.regions)
        self._broken = ""
        starts, ends = dict(plan.starts), dict(plan.ends)
        self._inputs = {s.name: self._bound.window(s.operand, starts[s.operand.value]) for s in program.inputs}
        self._stored = {s.name: self._bound.window(s.operand, starts[s.operand.value]) for s in program.stored}
        self._results = {
            id(slot): self._bound.window(slot.operand, ends[slot.operand.value])
            for slot in (*program.outputs, *program.gradients, *((program.loss,) if program.loss else ()))
        }
        slots = {slot.name: slot for slot in program.stored}
        kept = {slot.name: self._stored[slot.name] for slot in program.stored if slot.kind is not Kind.CONSTANT}
        trained = {name: array for name, array in kept.items() if slots[name].kind is Kind.PARAMETER}
        self.stored: Stored = Stored(slots, kept)
        self.parameters: Stored = Stored(slots, trained)
        self._poison = Poison(program, plan, self.regions) if poison else None
        for slot in program.stored:
            if share is None or self.program.values[slot.operand.value].region != PARAMETERS:
                assert slot.init is not None
                slot.init.fill(self._stored[slot.name], generator_for(seed, slot.name))

    def step(self, inputs: Mapping[str, Any] | None = None) -> Result:
        """Run the program once.

        Args:
            inputs: arrays by name; inputs with a default (the learning rate) may be left out.

        Raises:
            InputError: a wrong array; nothing has run and nothing has changed.
            SessionError: an earlier step was interrupted.
        """
        self._write_inputs({} if inputs is None else inputs)
        with self._breaking():
            if self._poison is None:
                self._bound.run()
            else:
                self._bound.run_watched(self._poison)
        return self._read_results()

    def trace(self, inputs: Mapping[str, Any] | None = None) -> tuple[Result, list[Timing]]:
        """Run the program once and time every step of the plan."""
        self._write_inputs({} if inputs is None else inputs)
        trace = Trace(self.program, self.plan)
        with self._breaking():
            self._bound.run_watched(trace)
        return self._read_results(), trace.timings

    def save(self, path: str | Path) -> None:
        """Write all that lasts to a safetensors file: `load` continues from it bit for bit.

        Raises:
            UsageError, SessionError: the file cannot be written; an older one at the same place is as it was.
        """
        from foreplan.runtime.checkpoint import save_checkpoint

        self._refuse_if_broken()
        save_checkpoint(str(path), self.program, self._stored)

    def load(self, path: str | Path, *, state: bool = True) -> None:
        """Read what `save` wrote; a file of parameters and buffers alone leaves the rest as it is.

        Args:
            path: of the checkpoint.
            state: False reads parameters and buffers alone: the state of the optimizer, the step count and the random
                state stay as they are.

        Raises:
            SessionError: the file is damaged, of another model, or has the state of another optimizer; the session is
                as it was.
        """
        from foreplan.runtime.checkpoint import load_checkpoint

        if load_checkpoint(str(path), self.program, self._stored, state):
            self._broken = ""

    @property
    def steps_done(self) -> int:
        """How many updates the parameters have had."""
        count = self.program.step_count
        return 0 if count is None else int(self._stored[count.name])

    def _write_inputs(self, inputs: Mapping[str, Any]) -> None:
        self._refuse_if_broken()
        arrays = check_inputs(self.program.inputs, inputs)
        if self._poison is not None:
            self._poison.start()
        for slot in self.program.inputs:
            if slot.name in arrays:
                np.copyto(self._inputs[slot.name], arrays[slot.name], casting="unsafe")
            else:
                assert slot.init is not None
                slot.init.fill(self._inputs[slot.name], generator_for(0, slot.name))

    def _read_results(self) -> Result:
        program, read = self.program, self._results
        loss = None if program.loss is None else float(read[id(program.loss)])
        outputs = {slot.name: read[id(slot)].copy() for slot in program.outputs}
        return Result(loss, outputs, {slot.name: read[id(slot)].copy() for slot in program.gradients})

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise SessionError(
                f"a step was interrupted ({self._broken}), so parameters and state may be half updated; "
                "load the last checkpoint, or bind again"
            )

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Mark the session broken when its step does not come to its end."""
        try:
            yield
        except BaseException as error:
            self._broken = type(error).__name__
            raise


def _regions(engine: Engine, program: Program, plan: Plan, share: Session | None) -> tuple[Sequence[np.ndarray], int]:
    """Memory of every region, and how many bytes of it are new."""
    heights = list(plan.heights)
    regions: dict[int, np.ndarray] = {}
    if share is not None:
        _check_sharing(program, plan, share)
        regions[PARAMETERS] = share.regions[PARAMETERS]
        if len(share.regions[ARENA]) >= heights[ARENA]:
            regions[ARENA] = share.regions[ARENA][: heights[ARENA]]
    wanted = [0 if i in regions else height for i, height in enumerate(heights)]
    try:
        fresh = engine.allocate(wanted)
    except MemoryError:
        raise SessionError(f"there is no memory for an arena of {format_bytes(sum(wanted))}") from None
    return [regions.get(i, memory) for i, memory in enumerate(fresh)], sum(wanted)


def _check_sharing(program: Program, plan: Plan, share: Session) -> None:
    def own(program: Program, plan: Plan) -> dict[str, tuple[str, int]]:
        starts = dict(plan.starts)
        return {
            slot.name: (str(slot.operand.type), starts[slot.operand.value])
            for slot in program.stored
            if program.values[slot.operand.value].region == PARAMETERS
        }

    mine, theirs = own(program, plan), own(share.program, share.plan)
    if mine != theirs:
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        raise SessionError(
            f"{program.model!r} and {share.program.model!r} cannot share parameters: {names[0]!r} is "
            f"{mine.get(names[0], ('missing',))[0]} in one and {theirs.get(names[0], ('missing',))[0]} in the other"
        )
