"""Exchanges of a plan on a card as calls: each that begins is kept until what waits for it is bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from foreplan.runtime.cuda.launch import Address, Await, Exchange
from foreplan.runtime.cuda.libraries.driver import Card
from foreplan.runtime.kernel import Run
from foreplan.runtime.ranks import World, current
from foreplan.runtime.ranks.nccl import communicator


class Links:
    """What a bound plan exchanges with other cards.

    Attributes:
        world: the ranks; those of the thread that binds.
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self.world: World = current()
        self._ends: dict[int, Run] = {}  # by the address where it arrives, what waits for an exchange

    def bind(self, instruction: Exchange | Await, where: Callable[[Address], int]) -> Run:
        """One instruction as a call. Those of a plan are bound in their order.

        Raises:
            TargetError: see `foreplan.runtime.ranks.nccl.communicator`.
        """
        target = where(instruction.target)
        if isinstance(instruction, Await):
            return self._ends.pop(target)
        group, source = self.world.group(instruction.ranks, instruction.stride), where(instruction.source)
        nccl = communicator(group, self.card)
        call = partial(nccl.exchange, instruction.kind, instruction.peer, source, target, instruction.nbytes)
        begin, self._ends[target] = self.card.exchanging(call)
        return begin
