"""The target `cuda`: launches on a card that is described, whether there is one or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreplan.errors import UsageError
from foreplan.graph import Op, Window
from foreplan.graph.op import Types
from foreplan.lower.target import DeviceProfile, Kernel, predicted

if TYPE_CHECKING:
    from foreplan.gpu.device import Device
    from foreplan.gpu.launch import Instruction, LaunchKernel
    from foreplan.lower.program import Program
    from foreplan.outside import Part
    from foreplan.planner.plan import Plan


# From the end of one node of a graph to the beginning of the next, in nanoseconds: assumed, none was measured.
LAUNCH = 1000


class CudaTarget:
    """A card. What it has no kernel for is decomposed, or refused: nothing runs elsewhere.

    Attributes:
        name: `cuda:` and the card's name: plans depend on it.
        device: its profile.
        tf32: whether cuDNN and cuBLASLt may round float32 to TensorFloat-32 on its way into products.
        deterministic: whether cuDNN's results must be the same bits each time.
    """

    alignment = 256

    def __init__(self, options: str) -> None:
        """A card by name, as `device_named` finds it, or the one in this machine; and how to compute.

        Args:
            options: `h100`, `h100,tf32`, `h100,tf32,nondeterministic`; empty: the card in this machine.

        Raises:
            UsageError: there is no such card, or no such choice.
        """
        from foreplan.gpu.device import device_named

        name, *choices = options.split(",")
        if unknown := sorted(set(choices) - {"tf32", "nondeterministic"}):
            raise UsageError(
                f"the target cuda has no choice {unknown[0]!r}; `cuda:h100,tf32,nondeterministic` has both"
            )
        if not name:
            from foreplan.gpu.capture import captured

            self.device = captured()
        else:
            self.device = device_named(name)
        self.tf32, self.deterministic = "tf32" in choices, "nondeterministic" not in choices
        self.name = f"cuda:{options}" if options else "cuda"
        self.profile = DeviceProfile(
            self.name,
            flops_per_second=self.device.flops_per_second,
            bytes_per_second=self.device.bytes_per_second,
            bus_bytes_per_second=self.device.bus_bytes_per_second,
            needs=(("compute capability", self.device.capability),),
        )

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Where that is better, of tensors in C order."""
        from foreplan.gpu.table import takes_place

        reads, writes = ([Window.dense(type) for type in types] for types in (inputs, outputs))
        return takes_place(op, reads, writes, self.device, tf32=self.tf32, deterministic=self.deterministic)

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
        """Launches of ours, where there are some for such tensors, and what libraries have; the fastest first."""
        from foreplan.gpu.table import kernels_for

        found = kernels_for(op, inputs, outputs, self.device, tf32=self.tf32, deterministic=self.deterministic)
        made = [self._kernel(name, each, op, inputs, outputs) for name, each in found.items()]
        return sorted(made, key=lambda kernel: kernel.nanoseconds or 0)

    def kernel(
        self, op: Op, name: str, payload: bytes, inputs: Sequence[Window], outputs: Sequence[Window]
    ) -> Kernel | None:
        """Launches of ours, or what a library runs, which need not be there to be told."""
        from foreplan.gpu.table import kernel_named

        found = kernel_named(op, name, payload, inputs, outputs, self.device)
        return None if found is None else self._kernel(name, found, op, inputs, outputs)

    def _kernel(
        self, name: str, made: LaunchKernel, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]
    ) -> Kernel:
        work = made.nanoseconds
        if work is None:
            work = self.profile.nanoseconds(op.cost([x.type for x in inputs], [y.type for y in outputs]))
        nanoseconds = work + LAUNCH * len(made.instructions)
        return Kernel(name, made.workspace, made.overwrites, made.parts, nanoseconds, made.payload, made.alignment)

    def price(self, op: Op, kernel: Kernel, inputs: Sequence[Window], outputs: Sequence[Window]) -> int:
        """Predicted."""
        return predicted(self.profile, op, kernel, inputs, outputs)


def outside(program: Program, plan: Plan) -> tuple[Part, ...]:
    """What a session of a planned step holds on its card besides the arena; nothing where the target is no card."""
    target, _, options = program.target.partition(":")
    if target != "cuda":
        return ()
    from foreplan.gpu.calibration import LIBRARIES, calibrations
    from foreplan.gpu.driver import versions_beside
    from foreplan.gpu.outside import outside_arena

    device, table = CudaTarget(options).device, calibrations()
    nodes = sum(1 for _ in _instructions(program, plan, device))
    kernels = {program.calls[step.action].kernel.split(" ")[0] for step in plan.steps}
    versions = versions_beside(device.title) if table.knows(device.title) else {}
    return outside_arena(device, plan.arena_bytes, nodes, sorted(kernels & set(LIBRARIES)), versions, table)


def with_code(program: Program, plan: Plan) -> Program:
    """The program with machine code of every kernel of ours that its plan runs, so that binding it compiles nothing.

    Raises:
        UsageError: the target is no card.
        TargetError: there is no CUDA compiler.
    """
    from foreplan.gpu.launch import Launch
    from foreplan.gpu.nvrtc import architecture_of, cubin, key_of

    target, _, options = program.target.partition(":")
    if target != "cuda":
        raise UsageError(
            f"kernels are put into plans for cards alone, and this one is for {program.target}: leave them out, or "
            f"plan for a target such as cuda:h100"
        )
    device = CudaTarget(options).device
    architecture = architecture_of(device)
    sources = {each.source for each in _instructions(program, plan, device) if isinstance(each, Launch)}
    made = {key_of(source, architecture): cubin(source, architecture) for source in sources}
    return replace(program, code=tuple(sorted(made.items())))


def _instructions(program: Program, plan: Plan, device: Device) -> Iterator[Instruction]:
    """All that a plan runs on a card, in order."""
    from foreplan.gpu.table import kernel_named

    for step in plan.steps:
        call = program.calls[step.action]
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        kernel = kernel_named(call.op, call.kernel, call.payload, reads, writes, device)
        yield from () if kernel is None else kernel.instructions
