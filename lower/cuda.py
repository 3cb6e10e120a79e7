"""The target `cuda`: launches on a card that is described, whether there is one or not."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.graph import Op, Window
from foreplan.graph.op import Types
from foreplan.lower.target import DeviceProfile, Kernel


class CudaTarget:
    """A card. What it has no kernel for is decomposed, or refused: nothing runs elsewhere.

    Attributes:
        name: `cuda:` and the card's name: plans depend on it.
        device: its profile.
    """

    alignment = 256

    def __init__(self, device: str) -> None:
        """The card of a name, as `foreplan.gpu.device.device_named` finds it.

        Raises:
            UsageError: there is no such card.
        """
        from foreplan.gpu.device import device_named

        self.device = device_named(device)
        self.name = f"cuda:{device}"
        self.profile = DeviceProfile(
            self.name,
            flops_per_second=self.device.flops_per_second,
            bytes_per_second=self.device.bytes_per_second,
            bus_bytes_per_second=self.device.bus_bytes_per_second,
        )

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Where there is a kernel for tensors in C order."""
        windows = ([Window.dense(type) for type in types] for types in (inputs, outputs))
        return bool(self.kernels(op, *windows))

    def reads(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """As the kernel says."""
        from foreplan.gpu.table import family_of

        family = family_of(op)
        return [family.reads(op, i, x) for i, x in enumerate(inputs)] if family else list(inputs)

    def layouts(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """As the kernel says."""
        from foreplan.gpu.table import family_of

        family = family_of(op)
        return family.layout(op, inputs, outputs) if family else [Window.dense(type) for type in outputs]

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Kernel]:
        """The kernel of the op's family, if it has one for such tensors."""
        from foreplan.gpu.table import kernel_for

        made = kernel_for(op, inputs, outputs, self.device)
        return () if made is None else (Kernel("launches", made.workspace, made.overwrites, made.parts),)

    def price(self, op: Op, kernel: Kernel, inputs: Sequence[Window], outputs: Sequence[Window]) -> int:
        """By the profile."""
        return self.profile.nanoseconds(op.cost([x.type for x in inputs], [y.type for y in outputs]))
