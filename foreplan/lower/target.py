"""What a target states: how fast the device is, and which kernels it has for an op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foreplan.graph import Cost, Op, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.op import Types


@dataclass(frozen=True)
class DeviceProfile:
    """The figures that predicted times are computed from.

    Attributes:
        name: for people.
        flops_per_second: of dense float32 contractions.
        bytes_per_second: of streaming reads and writes together.
        bus_bytes_per_second: copied between the device and host memory, in either direction.
        needs: what plans depend on, by name, such as a library's version: they run only where it is the same.
        memory_bytes: of the device, where the target names one; None: the host's, which no target names.
        narrow: the precision of `compile` in two bytes an element that the device computes in; empty: it has none.
        link: between such devices in one node, as `foreplan.lower.links` takes it.
        per_node: how many of them a node holds; None: ranks on a host, as many as there are.
    """

    name: str
    flops_per_second: int
    bytes_per_second: int
    bus_bytes_per_second: int
    needs: tuple[tuple[str, str], ...] = ()
    memory_bytes: int | None = None
    narrow: str = ""
    link: str = "memory"
    per_node: int | None = None

    def nanoseconds(self, cost: Cost) -> int:
        """The roofline (Williams, Waterman and Patterson 2009): whichever takes longer, arithmetic or memory."""
        arithmetic = cost.flops * 1_000_000_000 // self.flops_per_second
        memory = cost.nbytes * 1_000_000_000 // self.bytes_per_second
        return max(arithmetic, memory)

    def bus_nanoseconds(self, nbytes: int) -> int:
        """How long it takes to copy `nbytes` between device and host memory, with nothing else meanwhile."""
        return nbytes * 1_000_000_000 // self.bus_bytes_per_second


@dataclass(frozen=True)
class Candidate:
    """One way to run an op.

    Attributes:
        name: known to the target's engine.
        workspace: bytes of scratch memory, exact.
        overwrites: pairs (output, input): that output may take exactly that input's bytes.
        parts: (output, input, byte): that input may lie within that output already, from that byte on.
        nanoseconds: predicted; None: by the op's cost on the device's profile.
        payload: further data that a plan keeps and that runs: a library's own plan, serialised.
        alignment: every operand must begin a multiple of this number of bytes behind the beginning of its value.
    """

    name: str
    workspace: int
    overwrites: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, int, int], ...] = ()
    nanoseconds: int | None = None
    payload: bytes = field(default=b"", repr=False)
    alignment: int = 1


class Target(Protocol):
    """A kind of engine, as far as lowering needs to know it; holds no device."""

    name: str
    alignment: int  # of every value and workspace, in bytes

    @property
    def profile(self) -> DeviceProfile:
        """The speed of the device."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is guessed of this machine, for people."""

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Whether one op should take the place of several ops."""

    def reads(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """How every candidate takes the inputs: each as it lies, or as a copy that has to be made first."""

    def layouts(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """How the outputs of an op lie, given its inputs: each without gaps, its axes in some order."""

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
        """The candidates for an op on tensors with this layout, the preferred one first; none: lowering decomposes
        it."""

    def kernel(
        self, op: Op, name: str, payload: bytes, inputs: Sequence[Window], outputs: Sequence[Window]
    ) -> Candidate | None:
        """The kernel that a plan names, with its payload; None: there is no such kernel."""

    def blocks(self, op: Op, index: int, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Blocks]:
        """The blocks in which some kernels for an op would have an input lie that never changes."""

    def price(self, op: Op, kernel: Candidate, inputs: Sequence[Window], outputs: Sequence[Window]) -> int:
        """What one run of a kernel takes, in nanoseconds, predicted or measured."""


def named(kernels: Sequence[Candidate], name: str, payload: bytes) -> Candidate | None:
    """The kernel of that name and without payload, if it is among these."""
    return next((kernel for kernel in kernels if kernel.name == name and kernel.payload == payload), None)


def predicted(
    profile: DeviceProfile, op: Op, kernel: Candidate, inputs: Sequence[Window], outputs: Sequence[Window]
) -> int:
    """A kernel's time by its own prediction, or else by the roofline of its op."""
    if kernel.nanoseconds is not None:
        return kernel.nanoseconds
    return profile.nanoseconds(op.cost([x.type for x in inputs], [y.type for y in outputs]))
