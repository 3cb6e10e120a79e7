"""The parts of every engine's table: kernels, their families by op, and the error that refuses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from foreplan.graph import Op, Window
from foreplan.graph.layouts import in_c_order, lie_alike
from foreplan.graph.op import Types, Windows

Run = Callable[[], object]  # a kernel that is bound to memory
Layout = Callable[[Op, Windows, Types], Sequence[Window]]
Reads = Callable[[Op, int, Window], Window]
Make = TypeVar("Make")


class Refused(Exception):
    """A kernel cannot be made for an op on such tensors."""


class Kernel(Protocol):
    """One op on tensors of a certain layout, as lowering sees it.

    A kernel that joins tensors may also have `parts`, triples (output, input, byte): the input may already lie within
    the output, from that byte on. One of several kernels for an op has `nanoseconds`, its predicted time.
    """

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory that a run needs, exact."""

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """Pairs (output, input): that output may take exactly that input's bytes."""


def pairs_alike(inputs: Windows, outputs: Windows, first: int = 0) -> tuple[tuple[int, int], ...]:
    """Pairs of an output and an input, from the `first` on, that lie in the same way: a kernel that reads each element
    before it writes there may overwrite the input.
    """
    pairs = ((o, i) for o in range(len(outputs)) for i in range(first, len(inputs)))
    return tuple((o, i) for o, i in pairs if lie_alike(inputs[i], outputs[o]))


def as_it_lies(op: Op, index: int, window: Window) -> Window:
    """An input that is read in place."""
    return window


@dataclass(frozen=True)
class Family(Generic[Make]):
    """Kernels of one op.

    Attributes:
        ways: functions that make the kernels for tensors of a certain layout, by the names that plans have for them.
        layout: the outputs' layout, given the inputs'.
        reads: how input `index` is taken: as it lies, or as a copy with another layout.
        images: whether tensors of four axes may best lie with their channels last.
    """

    ways: Mapping[str, Make]
    layout: Layout = in_c_order
    reads: Reads = as_it_lies
    images: bool = False


@dataclass(frozen=True)
class Several:
    """A call that makes several calls."""

    runs: tuple[Run, ...]

    def __call__(self) -> None:
        """Make the calls one after the other."""
        for run in self.runs:
            run()


def one_after_another(*runs: Run) -> Run:
    """A call that makes these calls."""
    return runs[0] if len(runs) == 1 else Several(runs)
