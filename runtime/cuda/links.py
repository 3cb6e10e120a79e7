"""Exchanges of a plan on a card as calls: each that begins is kept until what waits for it is bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from foreplan.lower.program import Program
from foreplan.ops.point_to_point import RECEIVE, SEND, BeginMessage, BeginSend
from foreplan.runtime.cuda.launch import Address, Await, Exchange
from foreplan.runtime.cuda.libraries.driver import Card
from foreplan.runtime.cuda.libraries.nccl import Link, Way, communicator, ways
from foreplan.runtime.kernel import Run
from foreplan.runtime.world import World, world_here
from foreplan.runtime.world.stages import stages_of


class Links:
    """What a bound plan exchanges with other cards.

    Attributes:
        world: the ranks; those of the thread that binds.
    """

    def __init__(self, card: Card, program: Program) -> None:
        self.card, self.program = card, program
        self.world: World = world_here()
        self._ways: Mapping[Way, Link] | None = None  # to other stages
        self._ends: dict[int, Run] = {}  # by the address where it arrives, what waits for an exchange

    def bind(self, instruction: Exchange | Await, where: Callable[[Address], int]) -> Run:
        """One instruction as a call. Those of a plan are bound in their order.

        Raises:
            TargetError: see `foreplan.runtime.cuda.libraries.nccl`.
        """
        target = where(instruction.target)
        if isinstance(instruction, Await):
            return self._ends.pop(target)
        source = where(instruction.source)
        if instruction.kind in (SEND, RECEIVE):
            return self._message(instruction, source, target)
        group = self.world.group(instruction.ranks, instruction.stride)
        nccl = communicator(group, self.card)
        call = partial(nccl.exchange, instruction.kind, instruction.peer, source, target, instruction.nbytes)
        begin, self._ends[target] = self.card.exchanging(call)
        return begin

    def _message(self, message: Exchange, place: int, target: int) -> Run:
        """What begins one side of a message."""
        if not message.nbytes:
            return self._ends.setdefault(target, _nothing)
        if self._ways is None:
            self._ways = self._made()
        sends = message.kind == SEND
        way = (message.own, message.peer) if sends else (message.peer, message.own)
        move = partial(self._ways[way].send if sends else self._ways[way].receive, place, message.nbytes)
        begin, self._ends[target] = self.card.exchanging(move, way)
        return begin

    def _made(self) -> Mapping[Way, Link]:
        """The links to other stages. All ranks make them at the same time."""
        found = set[Way]()
        for call in self.program.calls_of(BeginMessage):
            ends = (call.op.own, call.op.peer)
            found.add(ends if call.of(BeginSend) else ends[::-1])
        return ways(stages_of(self.world, self.program), self.card, found)


def _nothing() -> None:
    """What a message without bytes takes."""
