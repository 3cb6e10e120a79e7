"""The target `cuda`: launches on a described card, which need not be in this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreplan.base.errors import UsageError
from foreplan.graph import Op, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.op import Types
from foreplan.lower.target import Candidate, DeviceProfile, predicted

if TYPE_CHECKING:
    from foreplan.runtime.cuda.launch import LaunchKernel


# From the end of one node of a graph to the beginning of the next, in nanoseconds (H200: an LSTM's and a GRU's training
# steps, 481 to 943 launches of a few KiB each, take 1,900 to 2,700 a launch).
LAUNCH = 2100


class CudaTarget:
    """A card. Ops without a kernel are decomposed or refused: nothing runs elsewhere.

    Attributes:
        name: `cuda:` and the card's name: plans depend on it.
        device: its profile.
        how: how NVIDIA's libraries may compute.
    """

    alignment = 256
    notes: tuple[str, ...] = ()

    def __init__(self, options: str) -> None:
        """A card by name, as `device_named` finds it, or the one in this machine; and how to compute.

        Args:
            options: `h100`, `h100,tf32`, `h100,tf32,nondeterministic`; empty: the card in this machine.

        Raises:
            UsageError: there is no such card, or no such choice.
        """
        from foreplan.runtime.cuda.device import device_named
        from foreplan.runtime.cuda.launch import Arithmetic

        name, *choices = options.split(",")
        if unknown := sorted(set(choices) - {"tf32", "nondeterministic", "strict"}):
            raise UsageError(
                f"the target cuda has no choice {unknown[0]!r}; `cuda:h100,tf32,nondeterministic` has both"
            )
        self.how = Arithmetic("tf32" in choices, "nondeterministic" not in choices, "strict" in choices)
        if self.how.tf32 and self.how.strict:
            raise UsageError("tf32 rounds more than accuracy='strict' allows: leave out one of both")
        if not name:
            from foreplan.runtime.cuda.libraries.capture import captured

            self.device = captured()
        else:
            self.device = device_named(name)
        self.name = f"cuda:{options}" if options else "cuda"
        self.profile = DeviceProfile(
            self.name,
            flops_per_second=self.device.flops_per_second,
            bytes_per_second=self.device.bytes_per_second,
            bus_bytes_per_second=self.device.bus_bytes_per_second,
            memory_bytes=self.device.memory_bytes,
            narrow=self.device.narrow,
            link=self.device.link,
            per_node=self.device.per_node,
            needs=(("compute capability", self.device.capability),),
        )

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Whether that is better, for tensors in C order."""
        from foreplan.runtime.cuda.table import takes_place

        reads, writes = ([Window.dense(type) for type in types] for types in (inputs, outputs))
        return takes_place(op, reads, writes, self.device, self.how)

    def reads(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """As the kernel says."""
        from foreplan.runtime.cuda.table import family_of

        family = family_of(op)
        return [family.reads(op, i, x) for i, x in enumerate(inputs)] if family else list(inputs)

    def layouts(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """As the kernel says."""
        from foreplan.runtime.cuda.table import family_of

        family = family_of(op)
        return family.layout(op, inputs, outputs) if family else [Window.dense(type) for type in outputs]

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
        """Foreplan's own launches, if there are some for such tensors, and libraries' kernels; the fastest first. None
        take tensors in blocks.
        """
        from foreplan.runtime.cuda.table import kernels_for

        if any(x.blocks is not None for x in inputs):
            return ()
        found = kernels_for(op, inputs, outputs, self.device, self.how)
        made = [self._kernel(name, each, op, inputs, outputs) for name, each in found.items()]
        return sorted(made, key=lambda kernel: kernel.nanoseconds or 0)

    def kernel(
        self, op: Op, name: str, payload: bytes, inputs: Sequence[Window], outputs: Sequence[Window]
    ) -> Candidate | None:
        """Foreplan's own launches, or a library's kernel; the library need not be installed."""
        from foreplan.runtime.cuda.table import kernel_named

        found = kernel_named(op, name, payload, inputs, outputs, self.device)
        return None if found is None else self._kernel(name, found, op, inputs, outputs)

    def _kernel(
        self, name: str, made: LaunchKernel, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]
    ) -> Candidate:
        work = made.nanoseconds
        if work is None:
            work = self.profile.nanoseconds(op.cost([x.type for x in inputs], [y.type for y in outputs]))
        nanoseconds = work + LAUNCH * len(made.instructions)
        return Candidate(name, made.workspace, made.overwrites, made.parts, nanoseconds, made.payload, made.alignment)

    def blocks(self, op: Op, index: int, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Blocks]:
        """None: strides say how all tensors lie."""
        return ()

    def price(self, op: Op, kernel: Candidate, inputs: Sequence[Window], outputs: Sequence[Window]) -> int:
        """Predicted."""
        return predicted(self.profile, op, kernel, inputs, outputs)


def target(options: str = "", tune: bool = False) -> CudaTarget:
    """The target: a card by name, or the one in this machine, and choices.

    Raises:
        UsageError: there is no such card, or no such choice.
    """
    if tune:
        raise UsageError("the target cuda has no kernels to choose from by measuring; only cpu has")
    return CudaTarget(options)
