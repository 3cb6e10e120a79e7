"""A session: a verified plan bound to one arena, with the values that last from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.errors import SessionError, UsageError
from foreplan.graph import Kind
from foreplan.graph.init import generator_for
from foreplan.lower.program import ARENA, HOST, PARAMETERS, Program, Slot
from foreplan.planner import verify
from foreplan.planner.plan import Plan
from foreplan.runtime.check import Timing, Trace
from foreplan.runtime.engine import Engine, Memory, Place, Watch
from foreplan.runtime.half import Half
from foreplan.runtime.inputs import check_array, check_inputs
from foreplan.runtime.numpy import NumpyEngine
from foreplan.runtime.update import Update
from foreplan.units import format_bytes


def _engine(target: str, capture: bool) -> Engine:
    kind = target.partition(":")[0]
    if kind == "cpu":
        from foreplan.runtime.cpu import CpuEngine

        return CpuEngine()
    if kind == "cuda":
        from foreplan.gpu import driver
        from foreplan.runtime.cuda import CudaEngine

        return CudaEngine(target, driver.card(), capture)
    return NumpyEngine()


@dataclass(frozen=True)
class Result:
    """What one step returns; copies, which stay as they are when the next step runs.

    Attributes:
        loss: the loss, its mean over the micro-batches where there are any; None where the program has none.
        outputs: by name; of all micro-batches, where there are any, one behind the other along a leading axis.
        gradients: by parameter, where the program returns them.
    """

    loss: float | None = None
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


class Stored(MutableMapping[str, np.ndarray]):
    """Named stored values; reading gives a copy, assigning checks shape and type and writes into the arena."""

    def __init__(self, slots: Mapping[str, Slot], places: Mapping[str, Place]) -> None:
        self._slots, self._places = slots, places

    def __getitem__(self, name: str) -> np.ndarray:
        return self._places[name].read().copy()

    def __setitem__(self, name: str, array: Any) -> None:
        if name not in self._places:
            raise SessionError(f"there is no stored value {name!r}; nothing can be added to a session")
        self._places[name].write(check_array(self._slots[name], array))

    def __delitem__(self, name: str) -> None:
        raise SessionError(f"{name!r} cannot be deleted: its place in the arena is part of the plan")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Session:
    """One arena and what runs in it. Nothing that grows with the model is allocated after it was made.

    Attributes:
        program: what runs; of a step that accumulates gradients, the half that runs for each micro-batch.
        plan: where and when.
        update: the other half, or None.
        allocated_bytes: how much memory was allocated for the arena.
        host_bytes: how much host memory was allocated for what is copied there.
        parameters: the trained values, by name.
        stored: everything that a checkpoint holds: parameters, buffers, optimizer state, step count, random state.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        *,
        update: Update | None = None,
        seed: int = 0,
        threads: int | None = None,
        share: Session | None = None,
        poison: bool = False,
        capture: bool = True,
    ) -> None:
        """Verify the plan, allocate, and draw the first parameters.

        Args:
            program: from `lower`.
            plan: for that program.
            update: what runs after the micro-batches of a step, where `program` is the body of one.
            seed: of everything that is drawn; each value depends on the seed and its own name alone.
            threads: of the BLAS library, for the whole process; None leaves them as they are. A plan for the target
                cpu has decided on them already.
            share: another session of the same model, whose parameters and buffers this one uses in place; its
                transient memory too, where that is large enough.
            poison: overwrite dead bytes with NaN patterns and check every write. Slow; for finding bugs.
            capture: whether a card runs its steps as one graph, captured in the first; if not, kernel by kernel.

        Raises:
            UsageError: a seed or a number of threads that is none.
            VerificationError: the plan is not right for the program.
            TargetError: there is no card, or none that the step was planned for.
            SessionError: the sessions cannot share, or there is no memory.
        """
        if not 0 <= seed < 1 << 63:
            raise UsageError(f"a seed is a whole number from 0 to 2**63 - 1, and is {seed}")
        verify(plan, program)
        if update is not None:
            update.verify(program, plan)
        self.program, self.plan, self.update = program, plan, update
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be at least 1, and is {threads}")
        engine = _engine(program.target, capture)
        engine.use_threads(program, threads)
        if share is not None:
            _check_sharing(program, plan, share)
        heights = plan.heights if update is None else update.heights(plan)
        self.regions, self.allocated_bytes = _regions(engine, heights[:HOST], share)
        self.host_bytes = sum(heights[HOST:])
        self.regions += _allocate(engine.allocate_host, heights[HOST:], "host memory")
        self._body = Half(engine, program, plan, self.regions, poison)
        self._update = None if update is None else Half(engine, update.program, update.plan, self.regions, poison)
        inputs = (*program.inputs, *(update.program.inputs if update else ()))
        self._inputs = {slot.name: slot for slot in inputs}
        self._broken = ""
        self._stored = self._body.stored
        slots = {slot.name: slot for slot in program.stored}
        kept = {slot.name: self._stored[slot.name] for slot in program.stored if slot.kind.is_kept}
        trained = {name: place for name, place in kept.items() if slots[name].kind is Kind.PARAMETER}
        self.stored: Stored = Stored(slots, kept)
        self.parameters: Stored = Stored(slots, trained)
        for slot in program.stored:
            if share is None or self.program.values[slot.operand.value].region != PARAMETERS:
                self._stored[slot.name].fill(partial(_draw, slot, seed))

    def step(self, inputs: Mapping[str, Any] | None = None) -> Result:
        """Run the program once; where it accumulates gradients, once for each micro-batch, and then its update.

        Args:
            inputs: arrays by name; inputs with a default (the learning rate) may be left out. Micro-batches are given
                at once: every input without a default has a leading axis that counts them.

        Raises:
            InputError: a wrong array; nothing has run and nothing has changed.
            SessionError: an earlier step was interrupted.
        """
        return self._run({} if inputs is None else inputs, {})

    def trace(self, inputs: Mapping[str, Any] | None = None) -> tuple[Result, list[Timing]]:
        """`step`, with every instruction that it runs timed."""
        timings: list[Timing] = []
        halves = [half for half in (self._body, self._update) if half is not None]
        watches = {half: Trace(half.program, half.plan, timings) for half in halves}
        return self._run({} if inputs is None else inputs, watches), timings

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
            for slot in self.program.stored:
                if slot.kind is Kind.ACCUMULATOR:  # an interrupted step has left its sums
                    self._stored[slot.name].fill(lambda sums: sums.fill(0))

    @property
    def steps_done(self) -> int:
        """How many updates the parameters have had."""
        count = self.program.step_count
        return 0 if count is None else int(self._stored[count.name].read())

    def _run(self, inputs: Mapping[str, Any], watches: Mapping[Half, Watch]) -> Result:
        self._refuse_if_broken()
        body, update = self._body, self._update
        count = 1 if self.update is None else self.update.micro_batches
        arrays = check_inputs(self._inputs, inputs, count if update else None)
        results = (*self.program.outputs, *self.program.gradients)
        read = {id(slot): _empty(slot, (count,) if update else ()) for slot in results}
        body.write(_micro_batch(self._inputs, arrays, 0) if update else arrays)
        try:
            for i in range(count):
                if i:
                    body.write(_micro_batch(self._inputs, arrays, i))
                body.run(watches.get(body))
                for slot in results:
                    np.copyto(read[id(slot)][i, ...] if update else read[id(slot)], body.result(slot))
            loss = None if self.program.loss is None else float(body.result(self.program.loss))
            if update is not None:
                update.write(arrays)
                update.run(watches.get(update))
        except BaseException as error:
            self._broken = type(error).__name__
            raise
        outputs = {slot.name: read[id(slot)] for slot in self.program.outputs}
        return Result(loss, outputs, {slot.name: read[id(slot)] for slot in self.program.gradients})

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise SessionError(
                f"a step was interrupted ({self._broken}), so parameters and state may be half updated; "
                "load the last checkpoint, or bind again"
            )


def _micro_batch(slots: Mapping[str, Slot], arrays: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """The inputs of one micro-batch: a slice of what has a leading axis for them, the rest as it is."""
    return {name: array[index] if slots[name].init is None else array for name, array in arrays.items()}


def _draw(slot: Slot, seed: int, elements: np.ndarray) -> None:
    """The first content of a stored value."""
    assert slot.init is not None
    slot.init.fill(elements, generator_for(seed, slot.name))


def _empty(slot: Slot, leading: tuple[int, ...]) -> np.ndarray:
    return np.empty((*leading, *slot.operand.type.shape), slot.operand.type.dtype.numpy)


def _regions(engine: Engine, heights: Sequence[int], share: Session | None) -> tuple[list[Memory], int]:
    """Memory of every region on the device, and how many bytes of it are new."""
    regions: dict[int, Memory] = {}
    if share is not None:
        regions[PARAMETERS] = share.regions[PARAMETERS]
        if len(share.regions[ARENA]) >= heights[ARENA]:
            regions[ARENA] = share.regions[ARENA][: heights[ARENA]]
    wanted = [0 if i in regions else height for i, height in enumerate(heights)]
    fresh = _allocate(engine.allocate, wanted, "an arena")
    return [regions.get(i, memory) for i, memory in enumerate(fresh)], sum(wanted)


def _allocate(
    allocate: Callable[[Sequence[int]], Sequence[Memory]], heights: Sequence[int], what: str
) -> Sequence[Memory]:
    try:
        return allocate(heights)
    except MemoryError:
        raise SessionError(f"there is no memory for {what} of {format_bytes(sum(heights))}") from None


def _check_sharing(program: Program, plan: Plan, share: Session) -> None:
    def own(program: Program, plan: Plan) -> dict[str, tuple[str, int]]:
        starts = dict(plan.starts)
        return {
            slot.name: (str(slot.operand.type), starts[slot.operand.value])
            for slot in program.stored
            if program.values[slot.operand.value].region == PARAMETERS
        }

    on_card = [each.target.partition(":")[0] == "cuda" for each in (program, share.program)]
    if on_card[0] != on_card[1]:
        raise SessionError(
            f"a session on {program.target} and one on {share.program.target} cannot share parameters: they lie on the "
            "card in one, and in host memory in the other"
        )
    mine, theirs = own(program, plan), own(share.program, share.plan)
    if mine != theirs:
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        raise SessionError(
            f"{program.model!r} and {share.program.model!r} cannot share parameters: {names[0]!r} is "
            f"{mine.get(names[0], ('missing',))[0]} in one and {theirs.get(names[0], ('missing',))[0]} in the other"
        )
