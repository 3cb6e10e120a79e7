"""The target `numpy`: every op by its own reference kernel."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.base.errors import UsageError
from foreplan.graph import Op, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.op import Types
from foreplan.lower.target import Candidate, DeviceProfile, named, predicted
from foreplan.ops.loop import Loop
from foreplan.runtime.loop import loop_candidates, loop_of


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
    notes: tuple[str, ...] = ()

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Never: a reference kernel is no faster for it."""
        return False

    def reads(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """As they lie, where the op says so of its reference kernel; else dense."""
        return reference_reads(op, inputs)

    def layouts(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """In C order."""
        return [Window.dense(type) for type in outputs]

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
        """The reference kernel, if the op has one; or the plan of a loop's body; nothing for tensors in blocks."""
        if any(x.blocks is not None for x in inputs):
            return ()
        return reference(op, inputs, outputs) or loop_candidates(op, self.name)

    def kernel(
        self, op: Op, name: str, payload: bytes, inputs: Sequence[Window], outputs: Sequence[Window]
    ) -> Candidate | None:
        """The reference kernel, or a loop with the plan that the payload holds."""
        if isinstance(op, Loop):
            return named((loop_of(op, self.name, payload).candidate,), name, payload)
        return named(self.kernels(op, inputs, outputs), name, payload)

    def blocks(self, op: Op, index: int, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Blocks]:
        """None: strides say how all tensors lie."""
        return ()

    def price(self, op: Op, kernel: Candidate, inputs: Sequence[Window], outputs: Sequence[Window]) -> int:
        """By the profile."""
        return predicted(self.profile, op, kernel, inputs, outputs)


def reference_reads(op: Op, inputs: Sequence[Window]) -> Sequence[Window]:
    """How the op's own NumPy kernel takes its inputs."""
    return [op.reads(index, window) for index, window in enumerate(inputs)]


def reference(op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
    """The op's own NumPy kernel, if it has one."""
    if type(op).compute is Op.compute:
        return ()
    types, results = [x.type for x in inputs], [y.type for y in outputs]
    overwrites, parts = op.overwrites(types, results), op.parts(types, results)
    return (Candidate("reference", op.workspace(types, results), overwrites, parts),)


def target(options: str = "", tune: bool = False) -> NumpyTarget:
    """The target; it has no options.

    Raises:
        UsageError: some are given.
    """
    if options:
        raise UsageError(f"the target numpy has no option {options!r}")
    if tune:
        raise UsageError("the target numpy has no kernels to choose from by measuring; only cpu has")
    return NumpyTarget()
