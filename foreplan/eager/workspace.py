"""What a convolution takes of a card's memory for its own duration, and who says it.

PyTorch asks cuDNN for engines, best first, and runs the first that it can: one whose workspace the caching allocator
has room for. Reference: `aten/src/ATen/native/cudnn/Conv_v8.cpp` of PyTorch 2.13, without `cudnn.benchmark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foreplan.base.units import format_bytes
from foreplan.graph import TensorType
from foreplan.ops.conv.common import ConvOp


class Library(Protocol):
    """A library of convolutions, asked for one card."""

    @property
    def name(self) -> str:
        """Its name and version, and the card, such as `cuDNN 9.19.1 for Tesla T4`."""

    @property
    def remark(self) -> str:
        """How far its answers are known to hold, for people."""

    def workspace(self, op: ConvOp, inputs: Sequence[TensorType], output: TensorType, limit: int | None) -> int | None:
        """Bytes that its first engine within a limit takes; None: it has no such engine.

        Args:
            op: a convolution, or a gradient of one.
            inputs, output: its tensors, in C order.
        """


@dataclass(eq=False)
class Workspaces:
    """How much each convolution takes.

    Attributes:
        limit: bytes that one may take at most; None: there is no limit.
        library: who is asked; None: nobody can be.
        missing: why not, for people.
        taken: how many convolutions and gradients of them have run.
        without: nodes for which the library has no engine within the limit.
    """

    limit: int | None = None
    library: Library | None = None
    missing: str = ""
    taken: int = 0
    without: dict[str, None] = field(default_factory=dict)

    def of(self, op: ConvOp, inputs: Sequence[TensorType], output: TensorType, gradient: bool, node: str) -> int:
        """Bytes of one convolution. Where nobody can be asked, a gradient takes all of the limit, and none without one.

        Args:
            gradient: whether it runs in the backward pass.
            node: of the model.
        """
        self.taken += 1
        if self.limit == 0 or self.library is None:
            return (self.limit or 0) * gradient
        nbytes = self.library.workspace(op, inputs, output, self.limit)
        if nbytes is None:
            self.without[node] = None
        return nbytes or 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What is counted of a card, and what is not, for people."""
        if not self.taken or self.limit == 0:
            return ()
        within = "" if self.limit is None else f" within {format_bytes(self.limit)}"
        if self.library is None and self.limit is None:
            return (
                f"workspaces of cuDNN are not counted, and may be gigabytes: {self.missing}; or say workspace=SIZE, "
                "what each gradient of a convolution takes",
            )
        if self.library is None:
            return (f"each gradient of a convolution is counted with {format_bytes(self.limit or 0)}: {self.missing}",)
        asked = self.library
        found = [
            f"workspaces of convolutions are the first choice{within} of {asked.name}, asked without the card; "
            f"{asked.remark}"
        ]
        if self.without:
            some = ", ".join(list(self.without)[:3])
            found.append(f"it has no engine{within} for {len(self.without)} nodes, such as {some}: PyTorch stops there")
        return tuple(found)
