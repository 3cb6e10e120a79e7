"""The plans of all stages run against each other, by predicted times: what each waits for, and whether all come to
their ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from foreplan.errors import PlanError
from foreplan.lower.program import Program
from foreplan.ops.collective import Begin, Finish
from foreplan.ops.point_to_point import BeginMessage, BeginSend
from foreplan.planner import Plan


class Message(NamedTuple):
    """What goes from one rank to another.

    Attributes:
        source, target: ranks.
        number: of those from one to the other.
        nbytes: its size.
    """

    source: int
    target: int
    number: int
    nbytes: int


class Messages(NamedTuple):
    """The messages of one rank, in the order of its plan.

    Attributes:
        sent, received: messages.
        shared: what all ranks exchange, as text.
    """

    sent: tuple[Message, ...]
    received: tuple[Message, ...]
    shared: tuple[str, ...]


def message_of(program: Program, action: int, rank: int) -> Message:
    """The message whose side on a rank an action begins."""
    call = program.calls[action]
    assert isinstance(call.op, BeginMessage)
    if isinstance(call.op, BeginSend):
        return Message(rank, call.op.peer, call.op.time, call.inputs[0].type.nbytes)
    return Message(call.op.peer, rank, call.op.time, call.outputs[0].type.nbytes)


def messages_of(program: Program, plan: Plan, rank: int) -> Messages:
    """The messages of a rank."""
    begun = [step.action for step in plan.steps if isinstance(program.calls[step.action].op, Begin)]
    sent, received, shared = list[Message](), list[Message](), list[str]()
    for action in begun:
        call = program.calls[action]
        if isinstance(call.op, BeginMessage):
            message = message_of(program, action, rank)
            (sent if message.source == rank else received).append(message)
        else:
            shared.append(f"{call.op} of {call.inputs[0].type}")
    return Messages(tuple(sent), tuple(received), tuple(shared))


def unmatched(ranks: Sequence[Messages]) -> str:
    """What is wrong with the messages of all ranks, for people: one is sent and not received, or the other way; empty:
    nothing is.
    """
    sent = [message for rank in ranks for message in rank.sent]
    received = [message for rank in ranks for message in rank.received]
    for some, others, what in ((sent, received, "never received"), (received, sent, "never sent")):
        if missing := sorted(set(some) - set(others)):
            source, target, number, nbytes = missing[0]
            return f"message {number} from rank {source} to rank {target}, {nbytes:,} bytes, is {what}"
    twice = sorted(message for some in (sent, received) for message in _repeated(message[:3] for message in some))
    if twice:
        return "message {2} from rank {0} to rank {1} has the number of another one".format(*twice[0])
    for number, kinds in enumerate(zip_longest(*(rank.shared for rank in ranks), fillvalue="nothing")):
        other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), 0)
        if other:
            return f"all ranks exchange, as number {number}, {kinds[0]} on rank 0 and {kinds[other]} on rank {other}"
    return ""


def _repeated(found: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    seen: set[tuple[int, ...]] = set()
    return {each for each in found if each in seen or seen.add(each)}  # type: ignore[func-returns-value]


@dataclass(frozen=True)
class StageTime:
    """How one stage spends a step.

    Attributes:
        busy: nanoseconds in which it computes.
        end: when it has done all, in nanoseconds from the beginning of the step.
        sent: bytes.
        messages: that it sends.
    """

    busy: int
    end: int
    sent: int
    messages: int


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
    """Run the plans of all stages, each a rank, from the beginning of a step.

    A stage computes one action after the other. A message moves when both sides have begun it, and the one before it
    between the same two ranks has arrived; each direction between two ranks is a link of its own. What all ranks
    exchange moves when all have begun it. A stage that waits stands still.

    Raises:
        PlanError: messages do not match, or stages wait for one another for ever: says which.
    """
    told = unmatched([messages_of(program, plan, rank) for rank, (program, plan) in enumerate(halves)])
    if told:
        raise PlanError(f"stages do not fit one another: {told}")
    return _Run(halves).run()


class _Run:
    """Stages on their way."""

    def __init__(self, halves: Sequence[tuple[Program, Plan]]) -> None:
        self.stages = [_Walk(program, plan, rank) for rank, (program, plan) in enumerate(halves)]
        # When each side has begun, by message; and of what all ranks exchange, by its number in their order.
        self.begun: dict[object, dict[int, int]] = {}
        self.taken: dict[object, int] = {}  # the time that it takes
        self.done: dict[object, int] = {}
        self.links: dict[tuple[int, int], list[Message]] = {}  # in the order in which they move
        self.free: dict[tuple[int, int], int] = {}

    def run(self) -> StagesRun:
        while any(stage.left for stage in self.stages):
            moved = [stage.go(self) for stage in self.stages]
            if not any(moved):
                waiting = "; ".join(f"{x.rank} at {x.node!r}" for x in self.stages if x.left)
                raise PlanError(f"stages wait for one another for ever: {waiting}")
        return StagesRun(tuple(StageTime(x.busy, x.now, x.sent, x.messages) for x in self.stages))

    def begin(self, what: object, rank: int, now: int, nanoseconds: int, sides: int) -> None:
        """One side begins an exchange; when all have, it moves."""
        begun = self.begun.setdefault(what, {})
        begun[rank] = now
        self.taken[what] = max(self.taken.get(what, 0), nanoseconds)
        if isinstance(what, Message):
            link = (what.source, what.target)
            if rank == what.source:
                self.links.setdefault(link, []).append(what)
            while (queue := self.links.get(link)) and len(self.begun[queue[0]]) == sides:
                first = queue.pop(0)
                start = max(self.free.get(link, 0), *self.begun[first].values())
                self.free[link] = self.done[first] = start + self.taken[first]
        elif len(begun) == sides:
            self.done[what] = max(begun.values()) + self.taken[what]


class _Walk:
    """One stage on its way through its plan."""

    def __init__(self, program: Program, plan: Plan, rank: int) -> None:
        self.program, self.plan, self.rank = program, plan, rank
        self.at = self.now = self.busy = self.sent = self.messages = self.shared = 0
        self.waits: dict[int, object] = {}  # by value where it arrives, what is waited for

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
            if isinstance(call.op, Begin):
                self.begin(run, index, call.op, action.nanoseconds)
            elif isinstance(call.op, Finish):
                done = run.done.get(self.waits[call.inputs[0].value])
                if done is None:
                    break
                self.now = max(self.now, done) + action.nanoseconds
            else:
                self.now += action.nanoseconds
                self.busy += action.nanoseconds
            self.at += 1
        return self.at > start

    def begin(self, run: _Run, index: int, op: Begin, nanoseconds: int) -> None:
        """Begin an exchange."""
        what: object
        if isinstance(op, BeginMessage):
            what, sides = message_of(self.program, index, self.rank), 2
        else:
            what, sides, self.shared = ("all", self.shared), op.ranks, self.shared + 1
        self.waits[self.program.calls[index].outputs[0].value] = what
        nbytes = op.sent(self.program.calls[index].inputs[0].type)
        self.sent, self.messages = self.sent + nbytes, self.messages + bool(nbytes)
        run.begin(what, self.rank, self.now, nanoseconds, sides)
