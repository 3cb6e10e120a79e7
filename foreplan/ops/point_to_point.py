"""Messages: a tensor goes from one rank to one other. Each rank may run a graph of its own.

A message begins on both sides, and each side waits for it by `finish_exchange`. What begins has a second result, one
byte without meaning: what reads it stands behind. So the messages of a rank have one order in every plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foreplan.base.errors import ShapeError
from foreplan.graph import Cost, DType, TensorType, register
from foreplan.graph.op import Arrays, Types, coerce_dtype
from foreplan.graph.types import DTYPES, FLOAT32, Shape
from foreplan.ops.collective import Begin

SEND, RECEIVE = "send", "receive"
TOKEN = TensorType(DTYPES["uint8"], (1,))


@dataclass(frozen=True)
class BeginMessage(Begin):
    """Begins one side of a message, in groups of ranks that are alike.

    Attributes:
        peer: the number in its group of the rank on the other side.
        time: the number of the message, of those that go from one rank to another.
        own: the number of this rank.
    """

    own: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.own == self.peer or not all(0 <= x < self.ranks for x in (self.own, self.peer)):
            raise ValueError(
                f"a message goes from one of 2 ranks or more to another, and not from rank {self.own} to rank "
                f"{self.peer} of {self.ranks}"
            )
        if self.kind != type(self).kind or self.time < 0:
            raise ValueError(f"kind must be {type(self).kind!r}, and time 0 or more: {self.kind!r}, {self.time}")

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: object) -> None:
        """Nothing goes to a rank that is not there; an engine of several ranks lets them exchange."""
        for array in outputs:
            array.fill(0)


@register
@dataclass(frozen=True)
class BeginSend(BeginMessage):
    """Begins to send a tensor. `finish_exchange` of the first result and the tensor waits until it is sent; until then
    the tensor stays as it is.

    Inputs: the tensor, and others that are only to be there before. Outputs: two of one byte.
    """

    name: ClassVar[str] = "begin_send"
    kind: str = SEND

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Two bytes."""
        if not inputs:
            raise ShapeError("begin_send takes what is sent, and got nothing")
        return (TOKEN, TOKEN)

    def sent(self, x: TensorType) -> int:
        """All of it."""
        return x.nbytes

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """It is read."""
        return Cost(0, inputs[0].nbytes)


@register
@dataclass(frozen=True)
class BeginReceive(BeginMessage):
    """Begins to receive a tensor. The first result has its place; it is there when `finish_exchange` of that and the
    first input has run.

    Inputs: what is only to be there before, one value at least. Outputs: the place, and one byte.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
    """

    name: ClassVar[str] = "begin_receive"
    kind: str = RECEIVE
    shape: Shape = ()
    dtype: DType = FLOAT32

    def __post_init__(self) -> None:
        super().__post_init__()
        coerce_dtype(self, "dtype")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type stated, and a byte."""
        if not inputs:
            raise ShapeError("begin_receive takes what is to be there before, and got nothing")
        return (TensorType(self.dtype, self.shape), TOKEN)

    def sent(self, x: TensorType) -> int:
        """Nothing."""
        return 0

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """It is written."""
        return Cost(0, outputs[0].nbytes)
