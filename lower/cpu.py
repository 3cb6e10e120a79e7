"""The target `cpu`: oneDNN and compiled loops, and the NumPy kernel for what has neither."""

from __future__ import annotations

import os
from collections.abc import Sequence

from foreplan.errors import UsageError
from foreplan.graph import Op, Window
from foreplan.graph.op import Types
from foreplan.lower.numpy import reference, reference_reads
from foreplan.lower.target import DeviceProfile, Kernel


class CpuTarget:
    """The processor of this machine, or so many of its threads.

    Attributes:
        name: `cpu`, with the number of threads where it was given: plans depend on it.
        threads: that work on each kernel.
    """

    alignment = 64

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be at least 1, and is {threads}")
        self.threads = threads or len(os.sched_getaffinity(0))
        self.name = f"cpu:threads={self.threads}"
        # What one core with AVX-512 was measured to do, a large product and a stream copy; threads share the memory.
        self.profile = DeviceProfile(
            self.name,
            flops_per_second=220_000_000_000 * self.threads,
            bytes_per_second=12_000_000_000 * min(self.threads, 4),
            bus_bytes_per_second=5_000_000_000,
        )

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Where there is a kernel."""
        from foreplan.cpu.table import family_of

        return family_of(op, inputs, outputs, self.threads) is not None

    def reads(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """As the kernel says."""
        from foreplan.cpu.table import family_of

        family = family_of(op, [x.type for x in inputs], outputs, self.threads)
        return [family.reads(op, i, x) for i, x in enumerate(inputs)] if family else reference_reads(op, inputs)

    def layouts(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """Images with their channels last where the kernel has them so; else in C order."""
        from foreplan.cpu.table import family_of

        family = family_of(op, [x.type for x in inputs], outputs, self.threads)
        return family.layout(op, inputs, outputs) if family else [Window.dense(type) for type in outputs]

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Kernel]:
        """The kernel of the op's family, or the reference kernel."""
        from foreplan.cpu.table import family_of, kernel_for

        family = family_of(op, [x.type for x in inputs], [y.type for y in outputs], self.threads)
        made = kernel_for(op, inputs, outputs, self.threads) if family else None
        if family is None or made is None:
            return reference(op, inputs, outputs)
        return (Kernel(family.name, made.workspace, made.overwrites, getattr(made, "parts", ())),)
