"""What a stage sends and receives, in one order that every plan keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from foreplan.graph import Builder, Fill, Kind, TensorType, Value
from foreplan.ops.collective import Finish, Group
from foreplan.ops.point_to_point import TOKEN, BeginReceive, BeginSend


class Begun(NamedTuple):
    """A message that is under way.

    Attributes:
        result: of what began it, which `finish_exchange` takes.
        first: what that read first: the tensor that is sent.
    """

    result: Value
    first: Value


class Wire:
    """The messages of one stage.

    Each begins behind those before it, and each wait stands behind all that have begun before it. So no order of a plan
    makes stages wait for one another in a circle, if the order in which they are listed does not: whatever moves, no
    message begins behind more waits than it was listed behind.
    """

    def __init__(self, b: Builder, stage: int, stages: Group) -> None:
        self.b, self.stage, self.stages = b, stage, stages
        self._behind = b.store("order", TOKEN, Kind.CONSTANT, Fill(0))
        self._sent: Value | None = None  # what is there when all that was waited for has been sent
        self._done: tuple[Value, ...] = ()  # what is there when the work before the next wait is done

    @property
    def ends(self) -> tuple[Value, ...]:
        """What is there when all has begun, and all that was waited for has been sent."""
        return (self._behind,) if self._sent is None else (self._behind, self._sent)

    def send(self, value: Value, to: int, number: int) -> Begun:
        """Begin to send a value to a stage."""
        op = self.stages.op(BeginSend, own=self.stage, peer=to, time=number)
        token, self._behind = self.b.node(op, value, self._behind, name="send")
        return Begun(token, value)

    def receive(self, type: TensorType, source: int, number: int) -> Begun:
        """Begin to receive a value of a stage."""
        about = {"own": self.stage, "peer": source, "time": number}
        op = self.stages.op(BeginReceive, **about, shape=type.shape, dtype=type.dtype)
        before = self._behind
        place, self._behind = self.b.node(op, before, name="receive")
        return Begun(place, before)

    def received(self, begun: Begun, name: str) -> Value:
        """Wait for what is received."""
        return self.b.apply(self.stages.op(Finish), *begun, self._behind, *self._done, name=name)

    def work_done(self, results: Iterable[Value]) -> None:
        """Let what is received from now on be waited for behind some work, which ends with these values."""
        self._done = tuple(results)

    def finish(self, sending: Iterable[Begun]) -> None:
        """Wait for what is sent."""
        for begun in sending:
            self._sent = self.b.apply(self.stages.op(Finish), *begun, *self.ends, name="sent")
