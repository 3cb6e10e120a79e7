"""A session: a verified plan bound to one arena, with the values that last from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.errors import InputError, SessionError, UsageError
from foreplan.graph import Kind
from foreplan.graph.init import generator_for
from foreplan.lower.program import ARENA, HOST, PARAMETERS, Program, Slot
from foreplan.planner import verify
from foreplan.planner.plan import Plan
from foreplan.runtime.check import Timing, Trace
from foreplan.runtime.engine import Engine, Memory, Place, Run, Watch
from foreplan.runtime.half import Half
from foreplan.runtime.inputs import check_array, check_inputs
from foreplan.runtime.numpy import NumpyEngine
from foreplan.runtime.update import Update
from foreplan.units import format_bytes

Arrays = dict[str, np.ndarray]


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
        self._results: tuple[Slot, ...] = (*program.outputs, *program.gradients)
        self._loss = None if program.loss is None else (program.loss, _empty(program.loss, ()))
        self._broken = ""
        self._taking = False
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
        return self._begin(self._parts({} if inputs is None else inputs), {})()

    def steps(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Result]:
        """Run a step for each batch, and give its result: as `step` does, with the same results bit for bit.

        The next batch is taken from `batches` and checked while a step runs on a card, before that step's result is
        given; on other engines too, so that a program does the same everywhere. Where the plan has second slots for
        inputs (`compile(prefetch=True)`), it is copied to the card meanwhile. An error, of a batch or in taking it, is
        raised behind the results of the steps before.

        Args:
            batches: what `step` takes, one after the other: a list, or a generator that makes them, which may
                use the arrays of a batch again for the next one.

        Raises:
            InputError: a wrong array, or no batches; nothing has changed since the last result.
            SessionError: a step was interrupted; or the batches run a step of this session themselves.
        """
        if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
            raise InputError(
                f"steps take batches one after the other, a list of mappings, and got {type(batches).__name__}"
            )
        return self._steps(iter(batches))

    def trace(self, inputs: Mapping[str, Any] | None = None) -> tuple[Result, list[Timing]]:
        """`step`, with every instruction that it runs timed."""
        timings: list[Timing] = []
        halves = [half for half in (self._body, self._update) if half is not None]
        watches = {half: Trace(half.program, half.plan, timings) for half in halves}
        return self._begin(self._parts({} if inputs is None else inputs), watches)(), timings

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

    def _steps(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Result]:
        taken, error = self._take(batches)
        while taken is not None:
            result = self._begin(taken, {})
            taken, error = self._take(batches)
            yield result()
        if error is not None:
            raise error

    def _take(self, batches: Iterator[Mapping[str, Any]]) -> tuple[list[Arrays] | None, Exception | None]:
        """The next batch, checked and on its way to the second slots; None at the end, or with what went wrong."""
        self._refuse_if_taking()
        self._taking = True
        try:
            for batch in batches:
                arrays = self._parts(batch)
                self._body.write_ahead(arrays[0])
                return arrays, None
        except Exception as error:
            return None, error
        finally:
            self._taking = False
        return None, None

    def _parts(self, inputs: Mapping[str, Any]) -> list[Arrays]:
        """The inputs of each run of the body, checked."""
        if self.update is None:
            return [check_inputs(self._inputs, inputs)]
        count = self.update.micro_batches
        arrays = check_inputs(self._inputs, inputs, count)
        return [_micro_batch(self._inputs, arrays, i) for i in range(count)]

    def _begin(self, batches: Sequence[Arrays], watches: Mapping[Half, Watch]) -> Callable[[], Result]:
        """Begin a step; what is returned waits until it is done. On a card all of it is queued by then, and what is
        written ahead meanwhile, or by another session that shares its memory, changes no result.
        """
        if self._broken or self._taking:
            self._refuse_if_broken()
            self._refuse_if_taking()
        body, update, slots, waits, last = self._body, self._update, self._results, [], len(batches) - 1
        read = [_empty(slot, () if update is None else (len(batches),)) for slot in slots]
        try:
            for i, arrays in enumerate(batches):
                body.write(arrays)
                body.run(watches.get(body))
                if i < last:
                    body.write_ahead(batches[i + 1])
                for slot, array in zip(slots, read):
                    waits.append(body.fetch(slot, array if update is None else array[i, ...]))
                while i < last and waits:
                    waits.pop()()
            if self._loss is not None:
                waits.append(body.fetch(*self._loss))
            if update is not None:
                update.write(batches[0])
                update.run(watches.get(update))
        except BaseException as error:
            self._broken = type(error).__name__
            raise
        return partial(self._finish, waits, read)

    def _finish(self, waits: list[Run], read: list[np.ndarray]) -> Result:
        try:
            for wait in waits:
                wait()
        except BaseException as error:
            self._broken = type(error).__name__
            raise
        loss = None if self._loss is None else float(self._loss[1])
        outputs = {slot.name: array for slot, array in zip(self.program.outputs, read)}
        gradients = {slot.name: array for slot, array in zip(self.program.gradients, read[len(outputs) :])}
        return Result(loss, outputs, gradients)

    def _refuse_if_taking(self) -> None:
        if self._taking:
            raise SessionError("the batches that `steps` takes are made while a step runs, and cannot run another one")

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise SessionError(
                f"a step was interrupted ({self._broken}), so parameters and state may be half updated; "
                "load the last checkpoint, or bind again"
            )


def _micro_batch(slots: Mapping[str, Slot], arrays: Arrays, index: int) -> Arrays:
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
