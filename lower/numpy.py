"""The target `numpy`: every op by its own reference kernel."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.graph import Op
from foreplan.graph.op import Types
from foreplan.lower.target import DeviceProfile, Kernel


class NumpyTarget:
    """Runs everything that has a reference kernel, everywhere."""

    name = "numpy"
    # A rough profile of one server core with its BLAS: 13 operations in the time that one byte takes. Its bus is a copy
    # from one place of the same memory to another, which reads and writes every byte.
    profile = DeviceProfile(
        "numpy",
        flops_per_second=130_000_000_000,
        bytes_per_second=10_000_000_000,
        bus_bytes_per_second=5_000_000_000,
    )
    alignment = 64

    def kernels(self, op: Op, inputs: Types, outputs: Types) -> Sequence[Kernel]:
        """The reference kernel, if the op has one."""
        if type(op).compute is Op.compute:
            return ()
        overwrites, parts = op.overwrites(inputs, outputs), op.parts(inputs, outputs)
        return (Kernel("reference", op.workspace(inputs, outputs), overwrites, parts),)

    def accepts_strides(self, op: Op, index: int, inputs: Types, strides: tuple[int, ...]) -> bool:
        """As the op says of its reference kernel."""
        return op.accepts_strides(index, inputs[index], strides)
