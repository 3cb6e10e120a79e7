"""Collectives of a plan as calls: each exchange that begins is kept until the plan waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from foreplan.lower.program import Call, Program
from foreplan.ops.collective import Begin, Collective, Finish, OfRank
from foreplan.ops.point_to_point import BeginMessage, BeginReceive
from foreplan.planner.plan import Plan
from foreplan.runtime.kernel import Run
from foreplan.runtime.world.world import World, world_here

Arrays = Sequence[np.ndarray]
EVERY = 200_000  # nanoseconds of work, after which a library is asked for what is under way


class Exchanges:
    """What a bound plan exchanges with other ranks, on the host.

    Attributes:
        world: the ranks; those of the thread that binds.
    """

    def __init__(self) -> None:
        self.world: World = world_here()
        self._waits: dict[int, Run] = {}  # by the address where it arrives, what waits for an exchange

    def bind(self, call: Call, inputs: Arrays, outputs: Arrays) -> Run:
        """A call of one collective on these arrays."""
        op = call.op
        assert isinstance(op, Collective), op
        group = self.world.group(op.ranks, op.stride)
        if isinstance(op, OfRank):
            return partial(op.on_rank, group.rank, inputs, outputs)
        if not outputs[0].size:  # it has no address, and nothing is sent
            return self.world.poll
        if isinstance(op, Finish):
            return partial(self._finish, _address(inputs[0]))
        if isinstance(op, BeginMessage):
            arrives = isinstance(op, BeginReceive)
            move, content = (group.receive, outputs[0]) if arrives else (group.send, inputs[0])
            if not content.size:
                return partial(self._begin, lambda: self.world.poll, _address(outputs[0]))
            what = f"{'' if arrives else 'the receipt of '}the message of node {call.node!r}"
            begin = partial(move, op.peer, op.time, _bytes(content), what)
            return partial(self._begin, begin, _address(outputs[0]))
        assert isinstance(op, Begin), op
        what = f"the {op.kind} of node {call.node!r}"
        begin = partial(group.begin, op.kind, op.peer, _bytes(inputs[0]), _bytes(outputs[0]), what)
        return partial(_exchange, begin) if op.wait else partial(self._begin, begin, _address(outputs[0]))

    def _begin(self, begin: Callable[[], Run], key: int) -> None:
        self._waits[key] = begin()

    def _finish(self, key: int) -> None:
        self._waits.pop(key)()


def _exchange(begin: Callable[[], Run]) -> None:
    """Begin an exchange, and wait for it at once."""
    begin()()


def with_polls(program: Program, plan: Plan, calls: Sequence[Run], exchanges: Exchanges) -> list[Run]:
    """The calls of a plan, and between them, while an exchange is under way, calls that let it go on: one for each
    stretch of work that is predicted to take as long as `EVERY`.
    """
    found, under_way, worked = list[Run](), 0, 0
    for step, call in zip(plan.steps, calls, strict=True):
        op = program.calls[step.action].op
        found.append(call)
        under_way += (isinstance(op, Begin) and not op.wait) - isinstance(op, Finish)
        worked += program.actions[step.action].nanoseconds
        if under_way and worked >= EVERY:
            found.append(exchanges.world.poll)
            worked = 0
    return found


def _bytes(array: np.ndarray) -> np.ndarray:
    """A dense array as bytes: no library knows all types."""
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
