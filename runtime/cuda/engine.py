"""The CUDA engine: a plan becomes launches, copies and calls of libraries in one arena, replayed as one graph."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from typing import cast

from foreplan.base.errors import DoesNotFitError, PlanError, TargetError, UsageError
from foreplan.base.units import align_up, format_bytes
from foreplan.lower.program import Call, Operand, Program, Slot
from foreplan.lower.targets import options_of
from foreplan.planner.plan import Plan, Step
from foreplan.runtime.cuda.launch import (
    ALIGNMENT,
    Address,
    Await,
    Choose,
    Clear,
    Copy,
    Exchange,
    Execute,
    Instruction,
    Launch,
    LaunchKernel,
    Multiply,
    holding,
)
from foreplan.runtime.cuda.libraries import driver
from foreplan.runtime.cuda.libraries.driver import Card
from foreplan.runtime.cuda.libraries.nvrtc import architecture_of, figures, key_of
from foreplan.runtime.cuda.links import Links
from foreplan.runtime.cuda.memory import DeviceAhead, DeviceMemory, DevicePlace, span_of, told
from foreplan.runtime.cuda.table import kernel_named, kernels_for
from foreplan.runtime.cuda.target import CudaTarget
from foreplan.runtime.engine import At, Memory, Peak, Watch
from foreplan.runtime.kernel import Run

Where = Callable[[Address], int]
QUEUEING = 60  # microseconds, at most, that the host takes to queue a call of a library


class CudaBound:
    """A plan on a card.

    Attributes:
        of_step: the calls of each step.
        calls: all of them, in order.
        replay: their captured graph; None before it is captured.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        regions: Sequence[DeviceMemory],
        card: Card,
        target: CudaTarget,
        capture: bool,
    ) -> None:
        self.program, self.regions, self.card, self.target = program, regions, card, target
        self.capture = capture
        self.code = dict(program.code) if program.trusted else {}
        self.of_step = [self._ready(step) for step in plan.steps]
        self.calls = [call for calls in self.of_step for call in calls]
        self.replay: Run | None = None
        self._crossing = self._staged(plan)

    def run(self) -> None:
        """Execute the plan once: the first time call by call, when the driver loads kernels; then as one graph."""
        with told("in the middle of a step"), self.card.allocating_nothing():
            if self.replay is not None:
                self.replay()
                return
            for call in self.calls:
                call()
        if self.capture and self.calls:
            with told("while a step was captured, which bind(capture=False) leaves out"):
                self.replay = self.card.captured(self.calls)

    def run_watched(self, watch: Watch) -> None:
        """Execute the plan once, call by call, with `watch` called around every step.

        The card is held back until a step's calls are queued: what a step takes is then the card's time alone. An
        exchange ends in the step that begins it, and a message in that which waits for it.
        """
        start, end = self.card.event(), self.card.event()
        for i, (hold, calls) in enumerate(zip(self._holds, self.of_step)):
            watch.before(i)
            with told("in the middle of a step"), self.card.allocating_nothing():
                hold()
                start.record()
                for call in calls:
                    call()
                self.card.settle()
                end.record()
                end.wait()
                seconds = end.seconds_since(start)
            watch.after(i, seconds)

    @cached_property
    def _holds(self) -> list[Run]:
        """For each step, a launch that takes as long as the host takes to queue its calls."""
        ticks = self.target.device.clock_hz * QUEUEING // 1_000_000
        made = {count: holding(ticks * (count + 1)) for count in set(map(len, self.of_step))}
        nowhere: Where = dict[Address, int]().__getitem__  # they have no operands
        runs = {n: self.card.launching(each, packed(each, nowhere), self._code(each)) for n, each in made.items()}
        return [runs[len(calls)] for calls in self.of_step]

    def place(self, operand: Operand, offset: int) -> DevicePlace:
        """The tensor whose value lies at `offset` of its region."""
        found = self._crossing.get((operand, offset))
        return found or DevicePlace(self.card, operand.window, self._address(operand, offset))

    def ahead(self, second: At, first: At) -> DeviceAhead:
        """The second slot of an input, and the input."""
        return DeviceAhead(self.card, self.place(*first), self._address(*second))

    def _staged(self, plan: Plan) -> dict[tuple[Operand, int], DevicePlace]:
        """Inputs and results, with pinned memory for their transfers: one allocation."""
        program, starts, ends = self.program, dict(plan.starts), dict(plan.ends)
        results: list[Slot] = [*program.outputs, *program.gradients, *([program.loss] if program.loss else [])]
        crossing = [(slot.operand, starts[slot.operand.value]) for slot in program.inputs]
        crossing += [(slot.operand, ends[slot.operand.value]) for slot in results]
        sizes = [align_up(span_of(operand.window)[0], ALIGNMENT) for operand, _ in crossing]
        with told("while pinned memory was allocated", harmless=True):
            pinned = self.card.allocate_host(sum(sizes))
        found, at = {}, 0
        for (operand, offset), size in zip(crossing, sizes):
            first = self._address(operand, offset)
            found[operand, offset] = DevicePlace(self.card, operand.window, first, pinned[at : at + size])
            at += size
        return found

    def _address(self, operand: Operand, offset: int) -> int:
        """Of a tensor's first element, whose value lies at `offset` of its region."""
        return self.regions[self.program.values[operand.value].region].address + offset + operand.offset

    def _ready(self, step: Step) -> list[Run]:
        """A step's calls."""
        action, call = self.program.actions[step.action], self.program.calls[step.action]
        reads, writes = dict(zip(action.reads, step.reads)), dict(zip(action.writes, step.writes))
        starts = {
            "input": [self._address(x, reads[x.value]) for x in call.inputs],
            "output": [self._address(y, writes[y.value]) for y in call.outputs],
            "workspace": [self.regions[action.workspace_region].address + step.workspace],
        }
        kernel = self._kernel(call, action.workspace)
        try:
            with told(f"while node {call.node!r} was bound", harmless=True):
                made = [
                    self._call(each, lambda place: starts[place.of][place.index] + place.offset)
                    for each in kernel.instructions
                ]
        except PlanError as error:
            raise PlanError(f"node {call.node!r}: {error}") from None
        return [run for run in made if run is not None]

    def _call(self, instruction: Instruction, where: Where) -> Run | None:
        """One instruction as a call of this rank; None where there is nothing to do."""
        if isinstance(instruction, Choose):
            group = self._links.world.group(len(instruction.choices), instruction.stride)
            instruction = instruction.choices[group.rank]
        if isinstance(instruction, Exchange | Await):
            return self._links.bind(instruction, where)
        return ready(self.card, instruction, where, self._code(instruction))

    @cached_property
    def _links(self) -> Links:
        """What goes between ranks."""
        return Links(self.card, self.program)

    def _code(self, instruction: Instruction) -> bytes | None:
        """The machine code of a launch, where the program has it."""
        if not self.code or not isinstance(instruction, Launch):
            return None
        code = self.code.get(key_of(instruction.source, architecture_of(self.target.device)))
        if code is not None and instruction.entry not in _entries(code):
            raise PlanError(f"the machine code in the plan has no kernel {instruction.entry!r}; plan the model again")
        return code

    def _kernel(self, call: Call, workspace: int) -> LaunchKernel:
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        device = self.target.device
        if call.payload and not self.program.trusted:
            made = kernels_for(call.op, reads, writes, device, self.target.how)
            kernel = made.get(call.kernel)
            if kernel is None or kernel.workspace != workspace:
                raise PlanError(
                    f"node {call.node!r}: the plan file has machine code for {call.kernel!r}, which runs if you trust "
                    "the file alone (trust_code=True, --trust-code), and cuDNN makes none such: plan the model again"
                )
            return kernel
        kernel = kernel_named(call.op, call.kernel, call.payload, reads, writes, device)
        if kernel is None or kernel.workspace != workspace:
            raise PlanError(f"node {call.node!r}: the kernel {call.kernel!r} needs another workspace; compile again")
        return kernel


@lru_cache(maxsize=4096)
def _entries(code: bytes) -> Collection[str]:
    """Names of the kernels in machine code."""
    try:
        return figures(code).keys()
    except ValueError:
        return ()


def ready(card: Card, instruction: Instruction, where: Where, code: bytes | None = None) -> Run | None:
    """One instruction of one rank as a call on a card; None where there is nothing to do.

    Args:
        where: gives the address of a place.
        code: machine code of a launch; None: it is compiled.
    """
    if isinstance(instruction, Launch):
        return card.launching(instruction, packed(instruction, where), code)
    if isinstance(instruction, Execute):
        tensors = {uid: where(place) for uid, place in instruction.operands}
        return card.executing(instruction.blob, tensors, where(instruction.workspace), instruction.nbytes)
    if isinstance(instruction, Multiply):
        return card.multiplying(instruction, tuple(map(where, instruction.places)), where(instruction.workspace))
    assert isinstance(instruction, Clear | Copy), instruction
    target, nbytes = where(instruction.target), instruction.nbytes
    if isinstance(instruction, Clear):
        return card.filling(target, 0, nbytes) if nbytes else None
    source = where(instruction.source)
    return card.copying(target, source, nbytes) if source != target and nbytes else None


def packed(launch: Launch, where: Where) -> bytes:
    """The structure of a kernel's arguments: addresses, int64 and double, eight bytes each."""
    words = [where(word) if isinstance(word, Address) else word for word in launch.arguments]
    return b"".join(struct.pack("<d" if isinstance(word, float) else "<q", word) for word in words)


class CudaEngine:
    """Runs programs lowered for the target `cuda`."""

    name = "cuda"

    def __init__(self, target: str, card: Card, capture: bool = True) -> None:
        """An engine on a card.

        Args:
            target: the one that programs were lowered for.
            card: the card in this machine.
            capture: whether steps are replayed as one graph; if not, call by call.

        Raises:
            TargetError: the target has another compute capability than the card.
        """
        self.card, self.capture = card, capture
        self.target = CudaTarget(options_of(target))
        device = self.target.device
        if device.capability != card.capability:
            raise TargetError(
                f"the step was planned for {device.title}, of compute capability {device.capability}, and the card "
                f"here is {card.title}, of {card.capability}: compile it for the target cuda, which is the one here"
            )

    def allocate(self, heights: Sequence[int]) -> list[DeviceMemory]:
        """One arena on the card for all regions, each aligned to 256 bytes."""
        starts, total = _stacked(heights)
        free, there = self.card.memory()
        if total > free:
            raise DoesNotFitError(
                f"the arena takes {format_bytes(total)}, and of the {format_bytes(there)} of {self.card.title} "
                f"{format_bytes(free)} are free: nvidia-smi shows what holds the rest; or compile with a lower budget",
                needed=total,
                capacity=free,
                lower_bound=total,
            )
        with told("when the arena was allocated", harmless=True):
            block = self.card.allocate(total)
        return [DeviceMemory(self.card, block, block.ptr + start, nbytes) for start, nbytes in zip(starts, heights)]

    def allocate_host(self, heights: Sequence[int]) -> list[DeviceMemory]:
        """Pinned memory, which kernels and copies address as they do the card's own."""
        starts, total = _stacked(heights)
        with told("when pinned memory was allocated", harmless=True):
            block = self.card.allocate_host(total)
        first = block.ctypes.data
        return [DeviceMemory(self.card, block, first + start, nbytes) for start, nbytes in zip(starts, heights)]

    def use_threads(self, program: Program, threads: int | None) -> None:
        """Nothing: a card schedules its own threads."""
        if threads is not None:
            raise UsageError(f"threads are the CPU's, and the step runs on {self.card.title}: leave them out")

    def peak(self, program: Program) -> Peak:
        """As the target describes the card."""
        profile = self.target.profile
        return Peak(profile.flops_per_second, profile.bytes_per_second, f"of the description of {self.card.title}")

    def bind(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> CudaBound:
        """Every step as ready calls."""
        memory = cast(Sequence[DeviceMemory], regions)
        return CudaBound(program, plan, memory, self.card, self.target, self.capture)


def engine(program: Program, capture: bool) -> CudaEngine:
    """The engine on the card in this machine.

    Raises:
        TargetError: there is none, or none that the program was lowered for.
    """
    return CudaEngine(program.target, driver.card(), capture)


def _stacked(heights: Sequence[int]) -> tuple[list[int], int]:
    """The beginnings of regions, one behind the other and aligned, and the height of all."""
    starts, total = [], 0
    for height in heights:
        starts.append(align_up(total, ALIGNMENT))
        total = starts[-1] + height
    return starts, total
