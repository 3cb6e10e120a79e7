"""Loops on any engine: the body is planned once, and its calls run in every step over the same workspace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from foreplan.base.errors import PlanError
from foreplan.base.units import align_up
from foreplan.graph import Cost, Op
from foreplan.lower.loop import Body, lower_body
from foreplan.lower.program import ARENA, Call, Operand, Program
from foreplan.lower.target import Candidate, Target
from foreplan.lower.targets import engine_info, target_named
from foreplan.ops.loop import Loop
from foreplan.planner import plan, verify
from foreplan.planner.plan import Plan, Step
from foreplan.planner.records import plan_of, plan_records
from foreplan.runtime.kernel import Run

PLANNED = "planned"  # the kernel's name
BindCall = Callable[[Call, list[np.ndarray], list[np.ndarray], np.ndarray], Run]
Copy = Callable[[np.ndarray, np.ndarray], Run]  # the first array into the second


@dataclass(frozen=True)
class Arrays:
    """The arrays of a loop."""

    inputs: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]
    workspace: np.ndarray


@dataclass(frozen=True)
class PlannedLoop:
    """A loop whose body has a plan: a `Kernel`.

    A carry lies in the output for the last one; or in its history, if it has one, a row further in each step. Slices,
    and what every step reads, are read where they lie. What a step adds to a stack is written to its place there. Where
    a row of a stack or a history is no aligned place, it is copied there.

    Attributes:
        target: its alignment is that of places within stacks that are written.
    """

    loop: Loop
    body: Body
    plan: Plan
    target: Target

    @property
    def workspace(self) -> int:
        """The arena of the body, and what every step reads in blocks."""
        return max([self.plan.heights[ARENA], *(start + size for start, size in self.in_blocks.values())])

    @cached_property
    def in_blocks(self) -> dict[int, tuple[int, int]]:
        """By value of the body that lies in blocks: where it begins in the workspace, behind the arena; its bytes."""
        found, end = dict[int, tuple[int, int]](), self.plan.heights[ARENA]
        for slot in self.body.program.stored:
            if slot.operand.blocks is not None:
                start = align_up(end, self.target.alignment)
                found[slot.operand.value] = start, slot.operand.nbytes
                end = start + slot.operand.nbytes
        return found

    @cached_property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """A carry may begin where it ends. A stack may take the place of slices if each step has read its slice before
        it writes there.
        """
        carries = self.loop.carries
        inputs, outputs = self.loop.graph.inputs, self.loop.results
        pairs = list(self.loop.overwrites((), ()))
        for o in range(carries, len(outputs)):
            for i in range(carries, carries + self.loop.slices):
                if outputs[o].type.nbytes == inputs[i].type.nbytes and self._reads_before(i, o - carries):
                    pairs.append((o, i))
        return tuple(pairs)

    def _reads_before(self, number: int, stack: int) -> bool:
        """Whether a step of the loop has read a slice before it writes to a stack, or in the same call, where that may
        take the bytes of what it reads.
        """
        written = self.body.stacks[stack].value
        if self.in_place.get(written) != stack:
            return True  # copied there at the end
        (read,) = (value for value, place in self.body.place.items() if place == number)
        program, steps = self.body.program, [step.action for step in self.plan.steps]
        first = next(i for i, action in enumerate(steps) if written in program.actions[action].writes)
        later = any(read in program.actions[action].reads for action in steps[first + 1 :])
        return not later and self._may_take(program.calls[steps[first]], written, read)

    def _may_take(self, call: Call, written: int, read: int) -> bool:
        """Whether a call may write a value over one that it reads, if it does."""
        windows = [x.window for x in call.inputs], [y.window for y in call.outputs]
        kernel = self.target.kernel(call.op, call.kernel, call.payload, *windows)
        o = next(i for i, y in enumerate(call.outputs) if y.value == written)
        return kernel is not None and all(
            (o, i) in kernel.overwrites and x.offset == 0 and x.window == call.outputs[o].window
            for i, x in enumerate(call.inputs)
            if x.value == read
        )

    @property
    def nanoseconds(self) -> int:
        """The times of the body's steps, predicted, and of copies into blocks."""
        actions = self.body.program.actions
        copied = 2 * sum(nbytes for _, nbytes in self.in_blocks.values())
        each = sum(actions[step.action].nanoseconds for step in self.plan.steps)
        return self.loop.steps * each + self.target.profile.nanoseconds(Cost(0, copied))

    @cached_property
    def in_place(self) -> dict[int, int]:
        """By value of the body, the stack where it is written: whole values, in C order, at aligned places."""
        found: dict[int, int] = {}
        values = self.body.program.values
        for number, operand in enumerate(self.body.stacks):
            whole = operand.offset == 0 and operand.type.nbytes == values[operand.value].nbytes
            free = operand.value not in found and operand.value not in self.body.place
            if whole and free and operand.window.is_dense and operand.type.nbytes % self.target.alignment == 0:
                found[operand.value] = number
        return found

    @cached_property
    def in_history(self) -> frozenset[int]:
        """The carries that lie in their histories."""
        inputs = self.loop.graph.inputs
        return frozenset(i for i in self.loop.histories if inputs[i].type.nbytes % self.target.alignment == 0)

    def moves(self, step: Step) -> bool:
        """Whether a call of the body reads or writes another place in each step of the loop."""
        call = self.body.program.calls[step.action]
        return any(self._in_stack(operand.value) for operand in (*call.inputs, *call.outputs))

    def _in_stack(self, value: int) -> bool:
        """Whether a value of the body lies in a stack, or in a history."""
        number = self.body.place.get(value, -1)
        return value in self.in_place or self.loop.is_slice(number) or number in self.in_history

    @cached_property
    def calls(self) -> int:
        """The number of calls that a bound loop holds: one for all its steps where nothing moves."""
        sizes = [(self.moves(step), _calls_of(self.body.program, step)) for step in self.plan.steps]
        stacked = sum(self.in_place.get(operand.value) != i for i, operand in enumerate(self.body.stacks))
        each = stacked + len(self.loop.histories) - len(self.in_history) + sum(size for moves, size in sizes if moves)
        packed = sum(slot.operand.blocks.copied for slot in self.body.program.stored if slot.operand.blocks)
        return packed + self.loop.steps * each + sum(size for moves, size in sizes if not moves)

    def runs(self, arrays: Arrays, bind: BindCall, copy: Copy) -> list[Run]:
        """All calls of all steps, in order: first carries are copied to their places, if they are not there.

        Args:
            bind, copy: make one call of the engine.
        """
        return _Binding(self, arrays, bind, copy).runs()

    @cached_property
    def payload(self) -> bytes:
        """The plan as text, which a plan file holds."""
        return json.dumps(plan_records(self.plan), separators=(",", ":")).encode()

    @property
    def candidate(self) -> Candidate:
        """The loop as lowering sees it."""
        return Candidate(PLANNED, self.workspace, self.overwrites, (), self.nanoseconds, self.payload)


@lru_cache(maxsize=256)
def _body(loop: Loop, name: str) -> tuple[Body, Target]:
    """The body of a loop on the target of a name, and the target."""
    target = target_named(name)
    return lower_body(loop, target), target


@lru_cache(maxsize=256)
def planned_loop(loop: Loop, name: str) -> PlannedLoop:
    """The plan of a loop's body on the target of a name, verified.

    Raises:
        UnsupportedError: see `lower_body`.
    """
    body, target = _body(loop, name)
    made = plan(body.program, remat="off")
    verify(made, body.program)
    return PlannedLoop(loop, body, made, target)


@lru_cache(maxsize=256)
def loop_of(loop: Loop, name: str, payload: bytes) -> PlannedLoop:
    """The loop whose body has a plan that a `payload` holds, as a plan file has it: it is verified before it is used.

    Raises:
        PlanError, VerificationError: the payload is no plan, or not one that is right for the body.
    """
    if not payload:  # of an action that a plan does not use
        return planned_loop(loop, name)
    body, target = _body(loop, name)
    try:
        made = plan_of(json.loads(payload))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PlanError(f"the plan of a loop's body is damaged ({type(error).__name__}: {error})") from None
    verify(made, body.program)
    found = PlannedLoop(loop, body, made, target)
    if found.payload != payload:
        raise PlanError("the plan of a loop's body is not as foreplan writes it")
    return found


def loop_candidates(op: Op, name: str) -> Sequence[Candidate]:
    """The kernel of a loop on the target of a name; none of another op, nor where an engine that has kernels of its own
    would run NumPy's in the body.
    """
    if not isinstance(op, Loop):
        return ()
    found = planned_loop(op, name)
    calls = found.body.program.calls
    if engine_info(name).falls_back and any(calls[step.action].kernel == "reference" for step in found.plan.steps):
        return ()
    return (found.candidate,)


def calls_of_loops(program: Program, plan: Plan) -> int:
    """The number of calls that the loops of a bound plan hold."""
    return sum(_calls_of(program, step) for step in plan.steps if program.calls[step.action].of(Loop))


def _calls_of(program: Program, step: Step) -> int:
    loop = program.calls[step.action].of(Loop)
    return loop_of(loop.op, program.target, loop.payload).calls if loop else 1


class _Binding:
    """Calls on the arrays of one loop."""

    def __init__(self, of: PlannedLoop, arrays: Arrays, bind: BindCall, copy: Copy) -> None:
        self.of, self.bind, self.copy = of, bind, copy
        self.inputs, self.workspace = arrays.inputs, arrays.workspace
        first, last = of.loop.carries, len(of.loop.results)
        self.carries, self.stacks = arrays.outputs[:first], arrays.outputs[first:last]
        self.histories = dict(zip(of.loop.histories, arrays.outputs[last:]))
        self.ends: dict[int, int] = {}
        for step in of.plan.steps:
            self.ends |= zip(of.body.program.actions[step.action].writes, step.writes)

    def runs(self) -> list[Run]:
        """First carries to their places, then the steps, then last carries to theirs."""
        loop, steps = self.of.loop, self.of.plan.steps
        order = list(reversed(range(loop.steps)) if loop.reverse else range(loop.steps))
        runs = [run for i, x in enumerate(self.inputs[: loop.carries]) for run in self.begin(i, x, order[0])]
        runs += [
            run for slot in self.of.body.program.stored if slot.operand.blocks for run in self.packed(slot.operand)
        ]
        same = {i: self.ready(step, 0) for i, step in enumerate(steps) if not self.of.moves(step)}
        for t in order:
            runs += [same[i] if i in same else self.ready(step, t) for i, step in enumerate(steps)]
            for number, operand in enumerate(self.of.body.stacks):
                if self.of.in_place.get(operand.value) != number:
                    added = self.array(operand, self.ends.get(operand.value, 0), t)
                    runs.append(self.copy(added, self.stacks[number][t, ...]))
            runs += [
                self.copy(self.carries[i], self.row(i, t, True)) for i in self.histories if i not in self.of.in_history
            ]
        return runs + [self.copy(self.row(i, order[-1], True), self.carries[i]) for i in sorted(self.of.in_history)]

    def begin(self, number: int, first: np.ndarray, t: int) -> Iterator[Run]:
        """Copies of a first carry to its places, if it is not there."""
        if number in self.histories:
            yield self.copy(first, self.row(number, t, False))
        if number not in self.of.in_history and first.ctypes.data != self.carries[number].ctypes.data:
            yield self.copy(first, self.carries[number])

    def packed(self, operand: Operand) -> list[Run]:
        """Copies of what every step reads into blocks."""
        assert operand.blocks is not None, operand
        given, there = self.inputs[self.of.body.place[operand.value]], self.array(operand, 0, 0)
        return [self.copy(*each) for each in operand.blocks.copies(given, there)]

    def row(self, number: int, t: int, after: bool) -> np.ndarray:
        """A carry before or after step t, in its history."""
        return self.histories[number][t + (after != self.of.loop.reverse), ...]

    def ready(self, step: Step, t: int) -> Run:
        """One call of one step."""
        program = self.of.body.program
        action, call = program.actions[step.action], program.calls[step.action]
        reads, writes = dict(zip(action.reads, step.reads)), dict(zip(action.writes, step.writes))
        inputs = [self.array(operand, reads[operand.value], t) for operand in call.inputs]
        outputs = [self.array(operand, writes[operand.value], t) for operand in call.outputs]
        return self.bind(call, inputs, outputs, self.workspace[step.workspace :][: action.workspace])

    def array(self, operand: Operand, place: int, t: int) -> np.ndarray:
        """An operand of the body in step t; `place` is that of its value in the arena, if it lies there."""
        if operand.blocks is not None:
            start, nbytes = self.of.in_blocks[operand.value]
            return self.workspace[start : start + nbytes].view(operand.type.dtype.numpy)
        number, stack = self.of.body.place.get(operand.value), self.of.in_place.get(operand.value)
        if stack is not None:
            whole = self.stacks[stack][t : t + 1]
        elif number is None:
            whole = self.workspace[place:]
        elif number in self.of.in_history:
            whole = self.row(number, t, self.of.body.program.values[operand.value].home >= 0)
        elif number < self.of.loop.carries:
            whole = self.carries[number]
        elif self.of.loop.is_slice(number):
            whole = self.inputs[number][t : t + 1]
        else:
            whole = self.inputs[number]
        type = operand.type
        if type.size == 0:
            return np.empty(type.shape, type.dtype.numpy)
        data = whole.reshape(-1).view(np.uint8)
        return np.ndarray(type.shape, type.dtype.numpy, data, operand.offset, operand.strides)
