"""The card in this machine, as sessions use it; no other file runs CuPy, cuDNN or cuBLASLt on it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np

from foreplan.base.errors import PlanError, TargetError
from foreplan.runtime.cuda.launch import Launch, Multiply, Source
from foreplan.runtime.cuda.libraries.cublaslt import Cublaslt, opened
from foreplan.runtime.cuda.libraries.cudnn import library, missing, on_card
from foreplan.runtime.cuda.libraries.number import own_number
from foreplan.runtime.cuda.libraries.nvml import Nvml
from foreplan.runtime.cuda.libraries.nvrtc import cubin
from foreplan.runtime.kernel import Run

USUAL_SHARED_BYTES = 48 << 10  # of a block, for which a kernel need not ask
_ADVICE = "`pip install 'foreplan[cuda13]'`, or 'foreplan[cuda12]' for a driver older than 580"


class Block(Protocol):
    """Device memory, freed with the last reference to it.

    Attributes:
        ptr: its address.
    """

    ptr: int


class Event(Protocol):
    """A point in the queued work of the card."""

    def record(self) -> None:
        """Place it after all work queued so far."""

    def wait(self) -> None:
        """Wait until the card has reached it; not at all if it was never recorded."""

    def seconds_since(self, earlier: Any) -> float:
        """The time from another event to this one; the card has reached both."""


class Card(Protocol):
    """A card, with a queue, a second queue for copies, and a third one for exchanges with other cards. All failures
    raise a RuntimeError with the driver's words.

    Attributes:
        title: its name.
        capability: compute capability, such as "9.0".
        bus: its address on the PCI bus, such as "0000:3b:00.0".
    """

    title: str
    capability: str
    bus: str

    def use(self) -> None:
        """Let this thread work on the card, which is not the first one of the machine for all ranks."""

    def memory(self) -> tuple[int, int]:
        """Free bytes, and all bytes."""

    def allocate(self, nbytes: int) -> Block:
        """Device memory, aligned to 256 bytes."""

    def allocate_host(self, nbytes: int) -> np.ndarray:
        """Host memory that the card itself can copy from and to, and address."""

    def launching(self, launch: Launch, arguments: bytes, code: bytes | None = None) -> Run:
        """A loaded kernel with its structure of arguments; its machine code is given, or else compiled."""

    def copying(self, target: int, source: int, nbytes: int, beside: bool = False) -> Run:
        """A copy between addresses on the card or in host memory; perhaps in the second queue."""

    def filling(self, target: int, byte: int, nbytes: int) -> Run:
        """Set bytes of device memory."""

    def executing(self, blob: bytes, tensors: Mapping[int, int], workspace: int, nbytes: int) -> Run:
        """A plan of cuDNN's with the addresses of its tensors, by number, and of `nbytes` of workspace.

        Raises:
            TargetError, PlanError: there is no cuDNN, or it does not take the plan, or needs more workspace for it.
        """

    def multiplying(self, product: Multiply, places: tuple[int, ...], workspace: int) -> Run:
        """Products by cuBLASLt with the addresses of a, b, c, d and perhaps a bias, and of its workspace.

        Raises:
            TargetError, PlanError: there is no cuBLASLt, or no algorithm of it gets by with the workspace.
        """

    def captured(self, calls: Iterable[Run]) -> Run:
        """Calls as one graph, which replays their queued work without making the calls."""

    def event(self, beside: bool = False) -> Event:
        """A new event, of either queue."""

    def synchronize(self) -> None:
        """Wait for all work of the first queue."""

    def hold(self, event: Any, beside: bool = False) -> None:
        """Let later work of a queue wait for an event; not at all if the event was never recorded."""

    def exchanging(self, queueing: Callable[[int], object], way: tuple[int, int] | None = None) -> tuple[Run, Run]:
        """Work in the third queue, or in one for each way to another card: a call that begins it, when the first queue
        has come to this place, and one that lets later work of the first queue wait for its end.

        Args:
            queueing: queues the work on a stream, given its address.
            way: from whom to whom, where it is between two cards.
        """

    def settle(self) -> None:
        """Let later work of the first queue wait for all of the third one. Ways to other cards go on: who waits for one
        may be what the other side waits for.
        """

    def allocating_nothing(self) -> contextlib.AbstractContextManager[object]:
        """A context for the work of a step: CuPy raises an error instead of allocating device memory."""


class _Event:
    """An event by CuPy."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self.cuda, self.stream, self.event = cuda, stream, cuda.Event()

    def record(self) -> None:
        """On its stream."""
        self.event.record(self.stream)

    def wait(self) -> None:
        """Block until it is reached."""
        self.event.synchronize()

    def seconds_since(self, earlier: _Event) -> float:
        """By the clock of the card."""
        return float(self.cuda.get_elapsed_time(earlier.event, self.event)) / 1000


class CupyCard:
    """A card of this machine, by CuPy; plans of cuDNN's by its own package, and cuBLASLt by ctypes.

    Attributes:
        number: which card, from 0 on: the one for this process.
    """

    def __init__(self) -> None:
        self.cuda = _cuda()
        with _no_card(self.cuda.runtime):
            self.number = own_number(self.cuda.runtime)
            attribute = partial(self.cuda.runtime.deviceGetAttribute, device=self.number)
            self.title = self.cuda.runtime.getDeviceProperties(self.number)["name"].decode()
            self.bus = self.cuda.runtime.deviceGetPCIBusId(self.number)
            self.compute = 10 * attribute(75) + attribute(76)  # cudaDevAttrComputeCapabilityMajor, …Minor
            self.use()
            self.stream = self.cuda.Stream(non_blocking=True)
        self.capability = f"{self.compute // 10}.{self.compute % 10}"
        self._module = lru_cache(maxsize=None)(self._load)
        self._plan = lru_cache(maxsize=None)(self._read)
        self._handle: Any = None

    def use(self) -> None:
        """A thread begins with the first card."""
        if self.number:
            self.cuda.runtime.setDevice(self.number)

    def memory(self) -> tuple[int, int]:
        """As `cudaMemGetInfo` has it."""
        self.use()
        free, total = self.cuda.runtime.memGetInfo()
        return free, total

    def allocate(self, nbytes: int) -> Block:
        """One `cudaMalloc`."""
        self.use()
        block: Block = self.cuda.Memory(nbytes)
        return block

    def allocate_host(self, nbytes: int) -> np.ndarray:
        """Pinned memory."""
        if not nbytes:
            return np.empty(0, np.uint8)
        memory = self.cuda.PinnedMemory(nbytes, self.cuda.runtime.hostAllocPortable)
        return np.frombuffer(self.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def launching(self, launch: Launch, arguments: bytes, code: bytes | None = None) -> Run:
        """A launch; a source is loaded once."""
        self.use()
        function = self._module(launch.source, code).get_function(launch.entry)
        words = (ctypes.c_uint64 * (len(arguments) // 8)).from_buffer_copy(arguments)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        extents, driver = (*launch.grid, *launch.block), self.cuda.driver
        if launch.shared > USUAL_SHARED_BYTES:
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(function.ptr, attribute, launch.shared)
        ready = partial(driver.launchKernel, function.ptr, *extents, launch.shared, self.stream.ptr)
        return _Launching(partial(ready, ctypes.addressof(parameters), 0), (function, words, parameters))

    def _load(self, source: Source, code: bytes | None) -> Any:
        """A module with all kernels of a source."""
        module = self.cuda.Module()
        module.load(cubin(source, f"sm_{self.compute}") if code is None else code)
        return module

    @cached_property
    def beside(self) -> Any:
        """The stream for copies of the next batch, made when there is one."""
        return self.cuda.Stream(non_blocking=True)

    def copying(self, target: int, source: int, nbytes: int, beside: bool = False) -> Run:
        """An asynchronous copy, in the direction that the addresses say."""
        runtime, stream = self.cuda.runtime, self.beside if beside else self.stream
        return partial(runtime.memcpyAsync, target, source, nbytes, runtime.memcpyDefault, stream.ptr)

    def filling(self, target: int, byte: int, nbytes: int) -> Run:
        """An asynchronous `memset`."""
        self.use()
        return partial(self.cuda.runtime.memsetAsync, target, byte, nbytes, self.stream.ptr)

    def executing(self, blob: bytes, tensors: Mapping[int, int], workspace: int, nbytes: int) -> Run:
        """A plan read back; each is read once."""
        self.use()
        plan, needed = self._plan(blob)
        if needed > nbytes:
            raise PlanError(
                f"cuDNN {library().version} needs {needed} bytes of workspace where {nbytes} are planned; compile again"
            )
        return partial(plan.execute, dict(tensors), workspace, self._handle)

    def _read(self, blob: bytes) -> tuple[Any, int]:
        """A plan and the workspace that it needs."""
        found = library()
        if self._handle is None:
            self._handle = found.module.create_handle()
            found.module.set_stream(self._handle, self.stream.ptr)
        plan = found.module.pygraph(handle=self._handle)
        try:
            plan.deserialize(self._handle, bytearray(on_card(blob, self._described)))
            return plan, int(plan.get_workspace_size())
        except Exception as error:  # the package's own errors have no common type
            if self.stream.is_capturing():  # the package runs a plan within a capture, which an error does not end
                with contextlib.suppress(RuntimeError):
                    self.stream.end_capture()
            raise PlanError(
                f"cuDNN {found.version} does not take a plan of its own, which another version has made, or for "
                f"another card: {error}; compile again"
            ) from None

    @cached_property
    def _described(self) -> str:
        """cuDNN's description of the card."""
        return str(library().module.create_device_properties(self.number).serialize())

    def multiplying(self, product: Multiply, places: tuple[int, ...], workspace: int) -> Run:
        """A call of cuBLASLt, its algorithm chosen."""
        self.use()
        return self._products.multiplying(product, places, workspace, self.stream.ptr)

    @cached_property
    def _products(self) -> Cublaslt:
        """cuBLASLt for CuPy's CUDA."""
        return opened(self.cuda.runtime.runtimeGetVersion() // 1000)

    def captured(self, calls: Iterable[Run]) -> Run:
        """A CUDA graph, made and uploaded."""
        self.stream.begin_capture()
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.stream.end_capture()
            raise
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        return partial(graph.launch, self.stream)

    def event(self, beside: bool = False) -> Event:
        """An event with its time."""
        self.use()
        return _Event(self.cuda, self.beside if beside else self.stream)

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()

    def hold(self, event: Any, beside: bool = False) -> None:
        """The stream waits, not the host."""
        (self.beside if beside else self.stream).wait_event(event.event)

    @cached_property
    def links(self) -> dict[object, Any]:
        """The streams for exchanges, by way, each made when there is one."""
        return {}

    def exchanging(self, queueing: Callable[[int], object], way: tuple[int, int] | None = None) -> tuple[Run, Run]:
        """Two events, which a graph captures as edges."""
        self.use()
        begun, done = (self.cuda.Event(disable_timing=True) for _ in range(2))
        if way not in self.links:
            self.links[way] = self.cuda.Stream(non_blocking=True)
        stream, links = self.stream, self.links[way]

        def begin() -> None:
            begun.record(stream)
            links.wait_event(begun)
            queueing(links.ptr)
            done.record(links)

        return begin, partial(stream.wait_event, done)

    def settle(self) -> None:
        """By an event, if there has been an exchange."""
        if None in self.links:
            self.stream.wait_event(self.links[None].record())

    def allocating_nothing(self) -> contextlib.AbstractContextManager[object]:
        """By an allocator that raises, for this thread."""
        self.use()
        manager: contextlib.AbstractContextManager[object] = self.cuda.using_allocator(_refuse)
        return manager


class _Launching:
    """A launch, with what lies at the addresses that it is given."""

    def __init__(self, launch: Run, kept: tuple[object, ...]) -> None:
        self.launch, self.kept = launch, kept

    def __call__(self) -> None:
        self.launch()


def _refuse(nbytes: int) -> Any:
    raise RuntimeError(f"CuPy was asked for {nbytes} bytes of device memory in the middle of a step")


def _cuda() -> Any:
    """CuPy's module of that name.

    Raises:
        TargetError: it is not installed, or for another CUDA than the driver's.
    """
    try:
        from cupy import cuda
    except Exception as error:  # missing libraries show in different ways
        raise TargetError(
            f"CuPy, through which steps run on a card, cannot be imported: {error}; install it with {_ADVICE}"
        ) from None
    driver, wanted = cuda.runtime.driverGetVersion() // 1000, cuda.runtime.runtimeGetVersion() // 1000
    if not driver:
        raise TargetError("there is no driver for an NVIDIA card in this machine, and so no card to run on")
    if driver < wanted:
        raise TargetError(
            f"the driver of this machine goes up to CUDA {driver}, and the installed CuPy is for CUDA {wanted}: "
            f"install the other one with `pip install 'foreplan[cuda{driver}]'`, or a newer driver"
        )
    return cuda


@contextlib.contextmanager
def _no_card(runtime: Any) -> Any:
    try:
        yield
    except runtime.CUDARuntimeError as error:
        raise TargetError(f"there is no card to run on in this machine, or it cannot be used: {error}") from None


@lru_cache(maxsize=1)
def card() -> Card:
    """The card in this machine, opened once; of several, the one for this process of a job.

    Raises:
        TargetError: there is none, or fewer than processes, or no driver, or no CuPy that goes with it.
    """
    return CupyCard()


def versions(nvml: Nvml) -> dict[str, str]:
    """The versions that identify calibrations: of the driver, of CuPy and its CUDA, and of cuDNN where it is installed.

    Raises:
        TargetError: there is no CuPy that goes with the driver.
    """
    number = _cuda().runtime.runtimeGetVersion()
    found = {"driver": nvml.driver, "cuda": f"{number // 1000}.{number % 1000 // 10}", "cupy": _cupy_version()}
    return found if missing() else found | {"cudnn": library().version}


def versions_beside(title: str) -> dict[str, str]:
    """The versions of this machine, if it has a card of that name; else none."""
    try:
        nvml = Nvml()
        return versions(nvml) if title in nvml.titles else {}
    except TargetError:
        return {}


def _cupy_version() -> str:
    import cupy

    return str(cupy.__version__)
