"""A session: a verified plan bound to one arena, with the values that last from step to step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.arguments import MOST_THREADS, flag, instance, whole
from foreplan.base.errors import InputError, SessionError
from foreplan.base.units import format_bytes
from foreplan.graph import Graph, Kind
from foreplan.lower.program import HOST, PARAMETERS, Program, Slot
from foreplan.lower.targets import engine_info
from foreplan.planner import verify
from foreplan.planner.plan import Plan
from foreplan.runtime.beside import Beside, Programs
from foreplan.runtime.bound_program import BoundProgram
from foreplan.runtime.check import Timing, Trace
from foreplan.runtime.engine import Engine, Memory, Watch
from foreplan.runtime.inputs import check_inputs, empty, micro_batch, smaller
from foreplan.runtime.magnitudes import adapters_with_magnitudes, write_norms
from foreplan.runtime.profile import Profile
from foreplan.runtime.regions import allocated, check_sharing, check_state, shared
from foreplan.runtime.result import Begun, Result
from foreplan.runtime.room import check_room, give_back
from foreplan.runtime.session_state import WAY_OUT
from foreplan.runtime.sizes import Sizes
from foreplan.runtime.stored_values import StoredValues, absent_in
from foreplan.runtime.turn import Turn
from foreplan.runtime.update import Update
from foreplan.runtime.world.agreement import together
from foreplan.runtime.world.digests import Digests
from foreplan.runtime.world.same_step import check_alike
from foreplan.runtime.world.stages import held_by_stages, stages_of
from foreplan.runtime.world.steps import StepNotes

if TYPE_CHECKING:
    pass

Arrays = dict[str, np.ndarray]

_CARD = Turn()  # the turn of all sessions on a card: they queue their work in one stream


class Session(Sizes):
    """One arena and what runs in it. Nothing that grows with the model is allocated after it was made.

    A session may be used from several threads. It serves one call at a time: a step, `save`, `load`, reading or writing
    a parameter; another call waits for its turn. Sessions that share an arena (`share`), and all sessions on a card,
    take turns; others run side by side. A forked process does not wait for threads that it does not have; a session
    that was forked in the middle of a step raises an error.

    Attributes:
        program: the program; of a step that accumulates gradients, the half that runs for each micro-batch.
        plan: its plan.
        update: the other half, or None.
        allocated_bytes: memory allocated for the arena.
        host_bytes: host memory allocated for values that are copied there.
        parameters: the weights by name, trained and frozen ones.
        stored: everything that a checkpoint holds: weights, buffers, optimizer state, step count, random state.
        held: by stage, how the weights are cut that it has, by name; empty where the step is whole.
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
        graphs: tuple[Graph | None, Graph | None] = (None, None),
        beside: Beside | None = None,
        of_step: bool = False,
    ) -> None:
        """Verify the plan, allocate, and draw the first parameters.

        Args:
            program: from `lower`.
            plan: for that program.
            update: runs after the micro-batches of a step, where `program` is its body.
            seed: of all random contents; each value depends only on the seed and its own name.
            threads: of the BLAS library, for the whole process; None leaves them as they are. A plan for the target cpu
                has fixed them already.
            share: another session of the same model. This one uses its parameters and buffers in place, and its
                transient memory if that is large enough. The other may have further parameters, such as a loss's.
            poison: overwrite dead bytes with NaN patterns and check every write. Slow; for finding bugs.
            capture: whether a card runs its steps as one graph, captured in the first; if not, kernel by kernel.
            graphs: the model that was compiled and its whole step, for `to_onnx`; None where they are not known.
            beside: what compiles the programs that run in this session's memory, for `evaluate` and for smaller
                batches; None: there is nothing that can.
            of_step: whether this session trains what the one that it shares with does, with batches of another size:
                they have all that they keep in common.

        Raises:
            UsageError: the seed or the number of threads is not valid.
            VerificationError: the plan is not right for the program.
            TargetError: there is no card of the kind that the step was planned for.
            SessionError: the sessions cannot share, or memory is short.
            DoesNotFitError: it needs more host memory than the machine or a limit of this process leaves.
        """
        seed = whole("a seed", seed, 0, (1 << 63) - 1)
        threads = None if threads is None else whole("threads", threads, 1, MOST_THREADS)
        poison, capture = flag("poison", poison), flag("capture", capture)
        if share is not None:
            instance("share", share, Session, "give what bind() returned, of a step of the same model")
        verify(plan, program)
        if update is not None:
            update.verify(program, plan)
        self._info = engine_info(program.target)
        way = "call by call" if poison or not capture else "as one graph"
        self._world = check_alike(program, plan, update, seed, way if self._info.on_card else "")  # as NCCL wants it
        self.program, self.plan, self.update = program, plan, update
        self.held = held_by_stages(stages_of(self._world, program), program) if program.is_stage else ()
        self._graphs, self._poison, self._capture = graphs, poison, capture
        self._beside = None if beside is None else Programs[Sizes](beside, program.loss is not None and update is None)
        engine: Engine = self._info.module("engine").engine(program, capture)
        engine.use_threads(program, threads)
        if share is not None:
            heights = plan.heights if update is None else update.heights(plan)
            check_sharing((program, plan), (share.program, share.plan), heights[PARAMETERS])
            if of_step:
                check_state((program, plan), (share.program, share.plan))
        self._mark = share._mark if share is not None and of_step else [""]
        self._absent = share._absent if share is not None else absent_in(program)
        self._turn: Turn = share._turn if share is not None else _CARD if self._info.on_card else Turn()
        self._engine = engine
        with self._turn.lock:
            self._bind(engine, share, seed, poison, of_step)
        give_back()

    def _bind(self, engine: Engine, share: Session | None, seed: int, poison: bool, of_step: bool) -> None:
        """Allocate, bind, and draw the first parameters."""
        program, plan, update = self.program, self.plan, self.update
        heights = plan.heights if update is None else update.heights(plan)
        self.host_bytes = sum(heights[HOST:])
        taken, wanted = shared(heights[:HOST], None if share is None else share.regions, of_step)
        self.allocated_bytes = sum(wanted)
        check_room(self.host_bytes + (0 if self._info.on_card else self.allocated_bytes), plan)
        fresh = allocated(engine.allocate, wanted, "an arena")
        self.regions: list[Memory] = [taken.get(i, memory) for i, memory in enumerate(fresh)]
        self.regions += allocated(engine.allocate_host, heights[HOST:], "host memory")
        self._body = BoundProgram(engine, program, plan, self.regions, poison)
        self._update = (
            None if update is None else BoundProgram(engine, update.program, update.plan, self.regions, poison)
        )
        inputs = (*program.inputs, *(update.program.inputs if update else ()))
        self._inputs = {slot.name: slot for slot in inputs}
        self._notes = StepNotes(program, self._inputs, self._world)
        self._results: tuple[Slot, ...] = (*program.outputs, *program.gradients)
        self._averaged = False  # whether weights hold their averages
        self._begun: Begun | None = None
        self._taking: set[int] = set()  # threads that are making a batch at this moment
        self._stored = self._body.stored
        slots = {slot.name: slot for slot in program.tensors}
        kept = {slot.name: self._stored[slot.name] for slot in program.tensors if slot.kind.is_kept}
        weights = {name: place for name, place in kept.items() if slots[name].kind in (Kind.PARAMETER, Kind.FROZEN)}
        self.stored: StoredValues = StoredValues(slots, kept, self._turn, self._assigned)
        self.parameters: StoredValues = StoredValues(slots, weights, self._turn, self._assigned)
        if of_step:
            return
        for value, row in self._body.rows.items():
            if share is None or program.values[value].region != PARAMETERS:
                row.fill(_clear)
        digests = Digests(self._world, program.of_stage)
        with together(self._world, "the first values to be drawn"):
            for slot in program.tensors:
                if share is None or program.values[slot.operand.value].region != PARAMETERS:
                    self._stored[slot.name].fill(digests.drawing(slot, seed))
        digests.agree("the first values")
        if share is None:
            write_norms(adapters_with_magnitudes(program.tensors), self._stored)

    def step(self, inputs: Mapping[str, Any] | None = None) -> Result:
        """Run the program once; where it accumulates gradients, once for each micro-batch, and then its update.

        A batch that trains may have fewer samples than the step was compiled for, as the last one of an epoch has. The
        same step for that batch is compiled when the first one comes, and kept. It has the weights, the optimizer's
        state and the arena of the step, within which it is planned; its loss is that of these samples.

        Args:
            inputs: arrays by name; inputs with a default (the learning rate) may be left out. All micro-batches are
                given at once: every input without a default has a leading axis for them.

        Raises:
            InputError: a wrong array, or a smaller batch that has no step of its own, as where there are micro-batches;
                nothing has run and nothing has changed.
            DoesNotFitError: the step for a smaller batch needs more than the arena has.
            SessionError: an earlier step was interrupted.
        """
        inputs = {} if inputs is None else inputs
        parts = self._parts_unless_smaller(inputs)
        with self._turn.lock:
            if parts is None:
                return self._of_size(inputs).step(inputs)
            return self._finish(self._begin(parts, {}))

    def steps(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Result]:
        """Run a step for each batch and yield its result, bit for bit the same as `step` gives.

        While a step runs on a card, the next batch is taken from `batches` and checked, before that step's result is
        given. Other engines take batches in the same order. With second slots for inputs (`compile(prefetch=True)`),
        the batch is also copied to the card meanwhile. An error of a batch is raised after the results of all earlier
        steps. While a batch is made, other threads may use the session.

        Args:
            batches: inputs as `step` takes them: a list, or a generator, which may use the arrays of a batch again for
                the next one.

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
        """Run `step` and time every instruction."""
        timings: list[Timing] = []
        halves = [half for half in (self._body, self._update) if half is not None]
        watches = {half: Trace(half.program, half.plan, timings) for half in halves}
        parts = self._parts({} if inputs is None else inputs)
        with self._turn.lock:
            return self._finish(self._begin(parts, watches)), timings

    def profile(self, inputs: Mapping[str, Any] | None = None, steps: int = 5) -> Profile:
        """Where the time of a step goes, by kernel and by module, beside what was predicted and what the machine can.

        It runs some steps, and as many more with every instruction timed: the session's weights change with each.

        Args:
            inputs: as for `step`; every step gets the same.
            steps: of each kind. Of all times the shortest counts.

        Raises:
            InputError, SessionError: as `step`.
        """
        steps = whole("steps", steps, 1, 1_000)
        self.step(inputs)
        least = math.inf
        for _ in range(steps):
            started = time.perf_counter()
            self.step(inputs)
            least = min(least, time.perf_counter() - started)
        traced = [self.trace(inputs)[1] for _ in range(steps)]
        shortest = tuple(min(runs, key=lambda timing: timing.seconds) for runs in zip(*traced))
        with self._turn.lock:
            peak = self._engine.peak(self.program)
        return Profile(self.program.target, least, shortest, peak, self.program.notes)

    def __repr__(self) -> str:
        size = format_bytes(self.allocated_bytes)
        return f"<Session of {self.program.model} on {self.program.target}: {size} allocated>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SessionError(
            "a session cannot be pickled or copied: its arena is memory of this process. Write it with save(path), and "
            "in the other process bind the compiled step, which can be pickled, and load(path)"
        )

    def _steps(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Result]:
        taken, error = self._take(batches)
        while taken is not None:
            if isinstance(taken, Mapping):  # smaller than the others
                result = self.step(taken)
                taken, error = self._take(batches)
            else:
                with self._turn.lock:
                    begun = self._begin(taken, {})
                taken, error = self._take(batches)
                with self._turn.lock:
                    result = self._finish(begun)
            yield result
        if error is not None:
            raise error

    def _take(
        self, batches: Iterator[Mapping[str, Any]]
    ) -> tuple[list[Arrays] | Mapping[str, Any] | None, Exception | None]:
        """The next batch, checked, with its copy to the second slots begun; as it is, where it is smaller than the
        others; None at the end, or with the error.
        """
        self._refuse_if_taking()
        try:
            self._taking.add(get_ident())
            for batch in batches:
                arrays = self._parts_unless_smaller(batch)
                if arrays is None:
                    return batch, None
                with self._turn.lock:
                    self._body.write_ahead(arrays[0])
                return arrays, None
        except Exception as error:
            return None, error
        finally:
            self._taking.discard(get_ident())
        return None, None

    def _bound_beside(self, program: Program, plan: Plan) -> Session:
        """A session of another program of the same model, in this one's memory; what has a loss trains it."""
        trains = program.loss is not None
        beside = Session(program, plan, share=self, of_step=trains, poison=self._poison, capture=self._capture)
        self.allocated_bytes += beside.allocated_bytes
        return beside

    def _drop_beside(self, session: Session) -> None:
        self.allocated_bytes -= session.allocated_bytes

    def _parts_unless_smaller(self, inputs: Mapping[str, Any]) -> list[Arrays] | None:
        """The inputs of each run of the body, checked; None for a batch that takes another step."""
        try:
            return self._parts(inputs)
        except InputError as error:
            if self._is_smaller(inputs):
                return None
            infers = self._beside is not None and self.program.loss is None and self.program.ranks == 1
            if infers and smaller(self.program, inputs) is not None:
                raise InputError(f"{error}; `evaluate` takes any number of samples") from None
            raise

    def _parts(self, inputs: Mapping[str, Any]) -> list[Arrays]:
        """The inputs of each run of the body, checked."""
        if self.update is None:
            return [check_inputs(self._inputs, inputs)]
        count = self.update.micro_batches
        arrays = check_inputs(self._inputs, inputs, count)
        return [micro_batch(self._inputs, arrays, i) for i in range(count)]

    def _begin(self, batches: Sequence[Arrays], watches: Mapping[BoundProgram, Watch]) -> Begun:
        """Begin a step. On a card all its work is queued when this returns. So neither writes ahead, nor writes of
        another session that shares its memory, change its results.
        """
        self._refuse_if_taking()
        self._settle()
        self._refuse_if_broken()
        body, update, slots, last = self._body, self._update, self._results, len(batches) - 1
        read = [empty(slot, () if update is None else (len(batches),)) for slot in slots]
        begun = Begun([], read, None if self.program.loss is None else empty(self.program.loss, ()))
        waits = begun.waits
        self._broken = "it has not ended"  # stays so if anything interrupts it
        try:
            if self._notes.in_use:
                waits.append(self._notes.begin(batches))  # before a card: a host that is late is told here
            for i, arrays in enumerate(batches):
                body.write(arrays)
                body.run(watches.get(body))
                if i < last:
                    body.write_ahead(batches[i + 1])
                for slot, array in zip(slots, read):
                    waits.append(body.fetch(slot, array if update is None else array[i, ...]))
                while i < last and waits:
                    waits.pop()()
            if begun.loss is not None:
                assert self.program.loss is not None
                waits.append(body.fetch(self.program.loss, begun.loss))
            if update is not None:
                update.write(batches[0])
                update.run(watches.get(update))
        except BaseException as error:
            self._broken = type(error).__name__
            raise
        self._begun = begun
        return begun

    def _settle(self) -> None:
        """Wait for the step that has begun, if any: the next use of its memory would spoil its results."""
        begun = self._begun
        if begun is None:
            return
        try:
            for wait in begun.waits:
                wait()
        except BaseException as error:
            self._broken, self._begun = type(error).__name__, None
            raise
        outputs = {slot.name: array for slot, array in zip(self.program.outputs, begun.read)}
        gradients = {slot.name: array for slot, array in zip(self.program.gradients, begun.read[len(outputs) :])}
        begun.result = Result(None if begun.loss is None else float(begun.loss), outputs, gradients)
        self._broken, self._begun = "", None

    def _finish(self, begun: Begun) -> Result:
        """The result of a step that has begun, or that another thread's call has waited for."""
        if begun.result is None:
            self._settle()
        if begun.result is None:  # another thread's call waited for it, and raised its error
            raise SessionError(f"the step was interrupted; {WAY_OUT}")
        return begun.result

    def _refuse_if_taking(self) -> None:
        if get_ident() in self._taking:
            raise SessionError("the batches that `steps` takes are made while a step runs, and cannot run another one")


def _clear(elements: np.ndarray) -> None:
    """Zeros."""
    elements.fill(0)
