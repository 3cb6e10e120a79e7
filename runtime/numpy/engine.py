"""The NumPy engine: a plan becomes a list of kernel calls on arrays that are windows onto one arena."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import cast

import numpy as np

from foreplan.base.errors import TargetError
from foreplan.base.units import align_up
from foreplan.graph.blocks import Blocks
from foreplan.graph.types import Shape
from foreplan.lower.program import Call, Operand, Program
from foreplan.ops.collective import Collective
from foreplan.ops.loop import Loop
from foreplan.planner.plan import Plan, Step
from foreplan.runtime.engine import At, Memory, Peak, Watch
from foreplan.runtime.kernel import Run, one_after_another
from foreplan.runtime.loop import Arrays, loop_of
from foreplan.runtime.stopwatch import SIDE, STREAM, least_seconds
from foreplan.runtime.world.bind import Exchanges, with_polls

ALIGNMENT = 64


def allocate(heights: Sequence[int]) -> list[np.ndarray]:
    """One uint8 allocation that holds every region, each aligned to 64 bytes; returns the regions.

    The pages are not touched: the operating system commits them when they are first written.
    """
    starts, total = [], 0
    for height in heights:
        starts.append(total)
        total = align_up(total + height, ALIGNMENT)
    raw = np.empty(total + ALIGNMENT, np.uint8)
    shift = -raw.ctypes.data % ALIGNMENT
    return [raw[shift + start : shift + start + height] for start, height in zip(starts, heights)]


def window(program: Program, regions: Sequence[np.ndarray], operand: Operand, offset: int) -> np.ndarray:
    """The array of a tensor whose value lies at `offset` of its region; in blocks, of all their elements."""
    region, type = regions[program.values[operand.value].region], operand.type
    if type.size == 0:
        return np.empty(type.shape, type.dtype.numpy)
    if operand.blocks is not None:
        return np.ndarray(operand.blocks.size, type.dtype.numpy, region, offset)
    return np.ndarray(type.shape, type.dtype.numpy, region, offset + operand.offset, operand.strides)


class HostPlace:
    """A tensor in host memory: an array that is a window onto the arena."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def read(self) -> np.ndarray:
        """The array itself."""
        return self.array

    def fill(self, make: Callable[[np.ndarray], object]) -> None:
        """Written in place."""
        make(self.array)

    def write(self, array: np.ndarray) -> None:
        """Copied; what float32 cannot hold is infinite, whatever NumPy was told to do then."""
        if array.dtype == self.array.dtype:
            self.array[...] = array
        else:
            with np.errstate(all="ignore"):
                self.array[...] = array

    def fetch(self, into: np.ndarray) -> Run:
        """Copied at once."""
        into[...] = self.read()
        return _nothing


class PlaceInBlocks(HostPlace):
    """A tensor in host memory whose elements lie in blocks. Each is read and written through a copy in C order."""

    def __init__(self, array: np.ndarray, shape: Shape, blocks: Blocks) -> None:
        super().__init__(array)
        self.shape, self.blocks = shape, blocks

    def read(self) -> np.ndarray:
        """A copy."""
        return self.blocks.unpacked(self.array).reshape(self.shape)

    def fill(self, make: Callable[[np.ndarray], object]) -> None:
        """Written to a copy first."""
        elements = np.empty(self.shape, self.array.dtype)
        make(elements)
        self.blocks.packed(elements, self.array)

    def write(self, array: np.ndarray) -> None:
        """Converted, then copied."""
        elements = HostPlace(np.empty(self.shape, self.array.dtype))
        elements.write(array)
        self.blocks.packed(elements.array, self.array)


class HostAhead(HostPlace):
    """The second slot of an input in host memory."""

    def __init__(self, array: np.ndarray, first: np.ndarray) -> None:
        super().__init__(array)
        self.first = first

    def move(self) -> None:
        """Copied at once."""
        self.first[...] = self.array


def _nothing() -> None:
    """What there is to wait for where all is done at once."""


class NumpyBound:
    """A plan on the NumPy engine.

    Attributes:
        regions: memory of each region.
        calls: one a step.
        run_calls: the same, and between them calls that let exchanges with other ranks go on.
    """

    def __init__(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> None:
        self.program = program
        self.regions = cast(Sequence[np.ndarray], regions)
        self.calls = [self._ready(step) for step in plan.steps]
        self.run_calls = with_polls(program, plan, self.calls, self.exchanges) if program.ranks > 1 else self.calls

    def _ready(self, step: Step) -> Run:
        action, call = self.program.actions[step.action], self.program.calls[step.action]
        reads, writes = dict(zip(action.reads, step.reads)), dict(zip(action.writes, step.writes))
        inputs = [self.window(operand, reads[operand.value]) for operand in call.inputs]
        for array in inputs:
            array.flags.writeable = False
        outputs = [self.window(operand, writes[operand.value]) for operand in call.outputs]
        scratch = self.regions[action.workspace_region][step.workspace : step.workspace + action.workspace]
        return self.bind(call, inputs, outputs, scratch)

    def bind(self, call: Call, inputs: list[np.ndarray], outputs: list[np.ndarray], scratch: np.ndarray) -> Run:
        """A call of one kernel on these arrays."""
        if body := call.of(Loop):
            loop = loop_of(body.op, self.program.target, body.payload)
            return one_after_another(*loop.runs(Arrays(inputs, outputs, scratch), self.bind, self.copy))
        if call.of(Collective):
            return self.exchanges.bind(call, inputs, outputs)
        return partial(call.op.compute, inputs, outputs, scratch)

    @cached_property
    def exchanges(self) -> Exchanges:
        """What goes between ranks."""
        return Exchanges()

    def copy(self, source: np.ndarray, result: np.ndarray) -> Run:
        """A call that copies an array into another one of its type and shape."""
        return partial(np.copyto, result, source)

    def window(self, operand: Operand, offset: int) -> np.ndarray:
        """The array of a tensor whose value lies at `offset` of its region."""
        return window(self.program, self.regions, operand, offset)

    def place(self, operand: Operand, offset: int) -> HostPlace:
        """The tensor whose value lies at `offset` of its region."""
        array = self.window(operand, offset)
        return HostPlace(array) if operand.blocks is None else PlaceInBlocks(array, operand.type.shape, operand.blocks)

    def ahead(self, second: At, first: At) -> HostAhead:
        """The second slot of an input, and the input."""
        return HostAhead(self.window(*second), self.window(*first))

    def run(self) -> None:
        """Execute the plan once."""
        with np.errstate(all="ignore"):  # infinities and NaNs are results like any other
            for call in self.run_calls:
                call()

    @property
    def apart(self) -> Sequence[Run]:
        """The calls one by one, as they are watched."""
        return self.calls

    def run_watched(self, watch: Watch) -> None:
        """Execute the plan once, with `watch` called around every step."""
        with np.errstate(all="ignore"):
            for i, call in enumerate(self.apart):
                watch.before(i)
                started = time.perf_counter()
                call()
                watch.after(i, time.perf_counter() - started)


def limit_threads(count: int) -> None:
    """Let NumPy's products use so many threads, in the whole process.

    Raises:
        TargetError: the system does not say which libraries this process has loaded.
    """
    from threadpoolctl import threadpool_limits

    try:
        threadpool_limits(count)
    except OSError as error:
        raise TargetError(f"the threads of NumPy's products cannot be set: {error}") from None


class NumpyEngine:
    """Runs programs lowered for the target `numpy`."""

    name = "numpy"

    def allocate(self, heights: Sequence[int]) -> list[np.ndarray]:
        """One arena for all regions."""
        return allocate(heights)

    def allocate_host(self, heights: Sequence[int]) -> list[np.ndarray]:
        """Another one of the same kind."""
        return allocate(heights)

    def use_threads(self, program: Program, threads: int | None) -> None:
        """Those of the BLAS library, for the whole process."""
        if threads is not None:
            limit_threads(threads)

    def peak(self, program: Program) -> Peak:
        """Measured: NumPy's product, and its copy."""
        a, b, y = (np.ones((SIDE, SIDE), np.float32) for _ in range(3))
        source, target = np.ones(STREAM // 4, np.float32), np.zeros(STREAM // 4, np.float32)
        product, copy = least_seconds(partial(np.matmul, a, b, y)), least_seconds(partial(np.copyto, target, source))
        return Peak(int(2 * SIDE**3 / product), int(2 * STREAM / copy), "NumPy's product and copy, measured now")

    def bind(self, program: Program, plan: Plan, regions: Sequence[Memory]) -> NumpyBound:
        """Every step as a ready call."""
        return NumpyBound(program, plan, regions)


def engine(program: Program, capture: bool) -> NumpyEngine:
    """The engine for a program; nothing is captured."""
    return NumpyEngine()
