"""The plans of all stages run against each other, by predicted times: what each waits for, and whether all come to
their ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from foreplan.base.errors import PlanError
from foreplan.lower.program import Call, Program
from foreplan.ops.collective import Begin, Finish
from foreplan.ops.point_to_point import BeginMessage, BeginSend
from foreplan.planner import Plan


class Message(NamedTuple):
    """What goes from one stage to another, from each rank to that of the same number.

    Attributes:
        source, target: stages.
        number: of those from one to the other.
        nbytes: its size.
    """

    source: int
    target: int
    number: int
    nbytes: int


class Messages(NamedTuple):
    """The messages of one stage, in the order of its plan.

    Attributes:
        sent, received: messages.
        shared: what all stages exchange, as text.
    """

    sent: tuple[Message, ...]
    received: tuple[Message, ...]
    shared: tuple[str, ...]


def message_of(call: Call[BeginMessage]) -> Message:
    """The message of which a call begins one side."""
    if call.of(BeginSend):
        return Message(call.op.own, call.op.peer, call.op.time, call.inputs[0].type.nbytes)
    return Message(call.op.peer, call.op.own, call.op.time, call.outputs[0].type.nbytes)


def messages_of(program: Program, plan: Plan) -> Messages:
    """The messages of a stage."""
    sent, received, shared = list[Message](), list[Message](), list[str]()
    for step in plan.steps:
        call = program.calls[step.action].of(Begin)
        if call and (message := call.of(BeginMessage)):
            (sent if message.of(BeginSend) else received).append(message_of(message))
        elif call and call.op.stride >= program.of_stage:
            shared.append(f"{call.op} of {call.inputs[0].type}")
    return Messages(tuple(sent), tuple(received), tuple(shared))


def unmatched(stages: Sequence[Messages]) -> str:
    """What is wrong with the messages of all stages, for people: one is sent and not received, or the other way; empty:
    nothing is.
    """
    sent = [message for stage in stages for message in stage.sent]
    received = [message for stage in stages for message in stage.received]
    for some, others, what in ((sent, received, "never received"), (received, sent, "never sent")):
        if missing := sorted(set(some) - set(others)):
            source, target, number, nbytes = missing[0]
            return f"message {number} from stage {source} to stage {target}, {nbytes:,} bytes, is {what}"
    twice = sorted(message for some in (sent, received) for message in _repeated(message[:3] for message in some))
    if twice:
        return "message {2} from stage {0} to stage {1} has the number of another one".format(*twice[0])
    for number, kinds in enumerate(zip_longest(*(stage.shared for stage in stages), fillvalue="nothing")):
        other = next((stage for stage, kind in enumerate(kinds) if kind != kinds[0]), 0)
        if other:
            return f"all stages exchange, as number {number}, {kinds[0]} in stage 0 and {kinds[other]} in stage {other}"
    return ""


def _repeated(found: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    seen: set[tuple[int, ...]] = set()
    return {each for each in found if each in seen or seen.add(each)}  # type: ignore[func-returns-value]


@dataclass(frozen=True)
class StageTime:
    """How one stage spends a step; each of its ranks alike.

    Attributes:
        busy: nanoseconds in which it computes.
        end: when it has done all, in nanoseconds from the beginning of the step.
        sent: bytes that a rank sends to other stages.
        messages: that it sends to them.
        exchanged: bytes that it sends to ranks of its own stage.
    """

    busy: int
    end: int
    sent: int
    messages: int
    exchanged: int


@dataclass(frozen=True)
class StagesRun:
    """A step of all stages.

    Attributes:
        stages: how each spends it.
    """

    stages: tuple[StageTime, ...]

    @property
    def nanoseconds(self) -> int:
        """Of the step."""
        return max(stage.end for stage in self.stages)

    @property
    def bubble(self) -> float:
        """The share of the step in which stages stand still, of all stages."""
        whole = self.nanoseconds * len(self.stages)
        return 1 - sum(stage.busy for stage in self.stages) / whole if whole else 0.0

    @property
    def slowest(self) -> int:
        """The stage that computes longest, which the step waits for."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].busy)


def run_stages(halves: Sequence[tuple[Program, Plan]]) -> StagesRun:
    """Run the plans of all stages, from the beginning of a step. All ranks of a stage do the same at the same time.

    A stage computes one action after the other. A message moves when both sides have begun it, and the one before it
    between the same two stages has arrived; each direction between two is a link of its own. What all stages exchange
    moves when all have begun it. The ranks of a stage have a link for what they exchange, one behind the other. A stage
    that waits stands still.

    Raises:
        PlanError: messages do not match, or stages wait for one another for ever: says which.
    """
    placed = [f"stage {program.stage} is number {i}" for i, (program, _) in enumerate(halves) if program.stage != i]
    told = (placed or [unmatched([messages_of(program, plan) for program, plan in halves])])[0]
    if told:
        raise PlanError(f"stages do not fit one another: {told}")
    return _Run(halves).run()


class _Run:
    """Stages on their way."""

    def __init__(self, halves: Sequence[tuple[Program, Plan]]) -> None:
        self.stages = [_Walk(program, plan) for program, plan in halves]
        # When each side has begun, by message; and of what all stages exchange, by its number in their order.
        self.begun: dict[object, dict[int, int]] = {}
        self.taken: dict[object, int] = {}  # the time that it takes
        self.done: dict[object, int] = {}
        self.links: dict[tuple[int, int], list[Message]] = {}  # in the order in which they move
        self.free: dict[tuple[int, int], int] = {}

    def run(self) -> StagesRun:
        while any(stage.left for stage in self.stages):
            moved = [stage.go(self) for stage in self.stages]
            if not any(moved):
                waiting = "; ".join(f"{x.stage} at {x.node!r}" for x in self.stages if x.left)
                raise PlanError(f"stages wait for one another for ever: {waiting}")
        return StagesRun(tuple(StageTime(x.busy, x.now, x.sent, x.messages, x.exchanged) for x in self.stages))

    def begin(self, what: object, stage: int, now: int, nanoseconds: int, sides: int) -> None:
        """One side begins an exchange; when all have, it moves."""
        begun = self.begun.setdefault(what, {})
        begun[stage] = now
        self.taken[what] = max(self.taken.get(what, 0), nanoseconds)
        if isinstance(what, Message):
            link = (what.source, what.target)
            if stage == what.source:
                self.links.setdefault(link, []).append(what)
            while (queue := self.links.get(link)) and len(self.begun[queue[0]]) == sides:
                first = queue.pop(0)
                start = max(self.free.get(link, 0), *self.begun[first].values())
                self.free[link] = self.done[first] = start + self.taken[first]
        elif len(begun) == sides:
            self.done[what] = max(begun.values()) + self.taken[what]


class _Walk:
    """One stage on its way through its plan."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan, self.stage = program, plan, program.stage
        self.at = self.now = self.busy = self.sent = self.messages = self.exchanged = self.shared = 0
        self.free = 0  # when what its ranks exchange has come to an end
        self.waits: dict[int, object] = {}  # by value where it arrives, what is waited for, or when it will be there

    @property
    def left(self) -> bool:
        """Whether there is more to do."""
        return self.at < len(self.plan.steps)

    @property
    def node(self) -> str:
        """Where it stands."""
        return self.program.calls[self.plan.steps[self.at].action].node

    def go(self, run: _Run) -> bool:
        """Go on until it waits for something that has not begun; whether it has moved."""
        start = self.at
        while self.left:
            index = self.plan.steps[self.at].action
            action, call = self.program.actions[index], self.program.calls[index]
            if begin := call.of(Begin):
                self.begin(run, begin, action.nanoseconds)
            elif call.of(Finish):
                what = self.waits[call.inputs[0].value]
                done = what if isinstance(what, int) else run.done.get(what)
                if done is None:
                    break
                self.now = max(self.now, done) + action.nanoseconds
            else:
                self.now += action.nanoseconds
                self.busy += action.nanoseconds
            self.at += 1
        return self.at > start

    def begin(self, run: _Run, call: Call[Begin], nanoseconds: int) -> None:
        """Begin an exchange."""
        op, place = call.op, call.outputs[0].value
        nbytes = op.sent(call.inputs[0].type)
        if op.stride < self.program.of_stage:
            self.free = self.waits[place] = max(self.now, self.free) + nanoseconds
            self.now, self.exchanged = self.free if op.wait else self.now, self.exchanged + nbytes
            return
        what: object
        if message := call.of(BeginMessage):
            what, sides = message_of(message), 2
        else:
            what, sides, self.shared = ("all", self.shared), op.ranks, self.shared + 1
        self.waits[place] = what
        self.sent, self.messages = self.sent + nbytes, self.messages + bool(nbytes)
        run.begin(what, self.stage, self.now, nanoseconds, sides)
