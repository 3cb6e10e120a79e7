"""A card that is not there: its memory is host memory, and its launches run on the CPU.

What is queued runs when something waits for it, as late as it may on a card, so that a wait that is missing shows. What
is queued beside, and exchanges, may run as early as they may instead: what they have to wait for then shows too.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from foreplan.base.errors import PlanError
from foreplan.graph import Op, Window
from foreplan.lower.target import Candidate
from foreplan.runtime.cuda.launch import Launch, Matrix, Multiply, Source
from foreplan.runtime.cuda.libraries.driver import Run
from foreplan.runtime.cuda.table import OWN
from foreplan.runtime.cuda.target import CudaTarget
from foreplan.runtime.world.world import comes_true
from tests.gpu.compiled import compile_all, function

Plan = Callable[[Mapping[int, int], int], None]  # runs on addresses of tensors, and of workspace
MAIN, COPIES, LINKS = range(3)  # queues
_running = threading.Lock()  # a kernel keeps the numbers of its threads in variables of the whole process


class OwnTarget(CudaTarget):
    """A card, with our own kernels alone."""

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
        return [kernel for kernel in super().kernels(op, inputs, outputs) if kernel.name == OWN]


class FakeBlock:
    """Memory that is watched: `live` of the card knows what has not been freed."""

    def __init__(self, card: FakeCard, nbytes: int) -> None:
        self.raw = np.full(nbytes + 256, 0xFF, np.uint8)
        self.ptr = self.raw.ctypes.data + -self.raw.ctypes.data % 256
        self.card, self.nbytes = card, nbytes
        card.live += nbytes

    def __del__(self) -> None:
        self.card.live -= self.nbytes


class FakeEvent:
    """Counts how often it was recorded, and reached: a record while one is on its way does not make that one count."""

    def __init__(self, card: FakeCard, queue: int) -> None:
        self.card, self.queue = card, queue
        self.recorded = self.reached = 0

    def record(self) -> None:
        if self.card.recording is not None:
            self.card.marked.add(self)
            self.card.recording.append(self.record)
            return
        self.recorded += 1
        self.card.enqueue(partial(self._reach, self.recorded), self.queue)

    def _reach(self, count: int) -> None:
        self.reached = count

    def wait(self) -> None:
        self.reach(self.recorded)

    def reach(self, count: int) -> None:
        while self.reached < count:
            self.card.run_next(self.queue)

    def seconds_since(self, earlier: FakeEvent) -> float:
        assert self.reached == self.recorded and earlier.reached == earlier.recorded
        return 1e-6


class Hold:
    """What a queue comes to where it waits for an event of another one."""

    def __init__(self, event: FakeEvent) -> None:
        self.event, self.count = event, event.recorded

    @property
    def blocks(self) -> bool:
        return self.event.reached < self.count

    def __call__(self) -> None:
        self.event.reach(self.count)


class Transfer:
    """A side of a message between two cards in their queues: it moves when the other side has come to it, too."""

    def __init__(self, blocked: Callable[[], bool], move: Run) -> None:
        self.blocked, self.move = blocked, move

    @property
    def blocks(self) -> bool:
        return self.blocked()

    def __call__(self) -> None:
        self.move()


class FakeCard:
    """What `foreplan.runtime.cuda.libraries.driver.Card` says.

    Attributes:
        plans: stand-ins for cuDNN's, by blob, with the workspace that they need.
        queues: what has been queued and not yet run; `queue` is the first one.
        marked: events that were recorded since a capture began.
        open: those of them that the first queue must still wait for.
        eager: whether queues but the first run as early as they may.
        stream: what NCCL is told: the place of exchanges; those of ways to other cards are next to it.
        crossed: copies that have run beside, by their target.
        live: bytes of device memory that are allocated.
        done: names of what was asked for, in order.
        launched: entries of kernels that have run, in order.
        sources: of kernels that are compiled, all at once, when the first of them runs.
        fail_after: how many further launches go well; None: all.
    """

    title = "fake H100"
    capability = "9.0"
    bus = "0000:3b:00.0"

    def __init__(self, reverse: bool = False, total: int = 1 << 30, eager: bool = False) -> None:
        self.reverse, self.total, self.eager = reverse, total, eager
        self.live = 0
        self.queues: list[list[Run]] = [[], [], []]
        self.ways: list[tuple[int, int] | None] = [None]  # of the queues from the third one on
        self.marked: set[FakeEvent] = set()
        self.open: set[FakeEvent] = set()
        self.stream = id(self)
        self.crossed: list[int] = []
        self.recording: list[Run] | None = None
        self.plans: dict[bytes, tuple[int, Plan]] = {}
        self.done: list[str] = []
        self.launched: list[str] = []
        self.sources: set[Source] = set()
        self.fail_after: int | None = None
        self.forbidden = False

    @property
    def queue(self) -> list[Run]:
        return self.queues[MAIN]

    def memory(self) -> tuple[int, int]:
        return self.total - self.live, self.total

    def allocate(self, nbytes: int) -> FakeBlock:
        assert not self.forbidden, "device memory was allocated in a step"
        self.done.append("allocate")
        return FakeBlock(self, nbytes)

    def allocate_host(self, nbytes: int) -> np.ndarray:
        self.done.append("allocate_host")
        return np.full(nbytes, 0xFF, np.uint8)

    def launching(self, launch: Launch, arguments: bytes, code: bytes | None = None) -> Run:
        self.sources.add(launch.source)
        extents = [(ctypes.c_uint * 3)(*each) for each in (launch.grid, launch.block)]
        return partial(self.enqueue, partial(self._launch, launch, extents, arguments))

    def _launch(self, launch: Launch, extents: list[ctypes.Array[ctypes.c_uint]], arguments: bytes) -> None:
        with _running:
            compile_all(self.sources)
            self.sources.clear()
            self._run(launch, extents, arguments)

    def _run(self, launch: Launch, extents: list[ctypes.Array[ctypes.c_uint]], arguments: bytes) -> None:
        run, size = function(launch.source, launch.entry)
        assert size == len(arguments), f"{launch.entry} takes {size} bytes of arguments, and gets {len(arguments)}"
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
        failed = run(*extents, int(self.reverse), arguments)
        assert failed is None, f"{launch.entry}: {failed.decode()}"
        self.launched.append(launch.entry)

    def copying(self, target: int, source: int, nbytes: int, beside: bool = False) -> Run:
        return partial(self.enqueue, partial(self._copy, target, source, nbytes, beside), COPIES if beside else MAIN)

    def _copy(self, target: int, source: int, nbytes: int, beside: bool) -> None:
        ctypes.memmove(target, source, nbytes)
        if beside:
            self.crossed.append(target)

    def filling(self, target: int, byte: int, nbytes: int) -> Run:
        return partial(self.enqueue, partial(ctypes.memset, target, byte, nbytes))

    def executing(self, blob: bytes, tensors: Mapping[int, int], workspace: int, nbytes: int) -> Run:
        needed, plan = self.plans[blob]
        if needed > nbytes:
            raise PlanError(f"{needed} bytes of workspace where {nbytes} are planned")
        return partial(self.enqueue, partial(plan, dict(tensors), workspace))

    def multiplying(self, product: Multiply, places: tuple[int, ...], workspace: int) -> Run:
        self.done.append("multiply")
        return partial(self.enqueue, partial(multiply, product, places, workspace))

    def enqueue(self, run: Run, queue: int = MAIN) -> None:
        if self.recording is not None:
            assert queue != COPIES, "what runs beside cannot be captured"
            self.recording.append(partial(self.enqueue, run, queue))
        else:
            self.queues[queue].append(run)
            self._run_ahead()

    def _run_ahead(self) -> None:
        for queue in self.queues[COPIES : LINKS + 1] if self.eager else ():
            while queue and not (isinstance(hold := queue[0], Hold) and hold.blocks):
                queue.pop(0)()
        if self.eager:
            self.go_between()

    def go_between(self) -> bool:
        """Let queues of ways to other cards go on as far as they can, each by itself; whether one has."""
        gone = False
        for queue in self.queues[LINKS + 1 :]:
            while queue and not (isinstance(queue[0], Hold | Transfer) and queue[0].blocks):
                queue.pop(0)()
                gone = True
        return gone

    def captured(self, calls: Iterable[Run]) -> Run:
        self.done.append("capture")
        self.recording, self.marked, self.open = [], set(), set()
        for call in calls:
            call()
        assert not self.open, "a capture ends with exchanges that nothing waits for"
        recorded, self.recording = self.recording, None
        return partial(self._replay, recorded)

    def _replay(self, recorded: list[Run]) -> None:
        self.done.append("replay")
        for again in recorded:
            again()

    def event(self, beside: bool = False) -> FakeEvent:
        return FakeEvent(self, COPIES if beside else MAIN)

    def hold(self, event: FakeEvent, beside: bool = False) -> None:
        self._hold(event, COPIES if beside else MAIN)

    def _hold(self, event: FakeEvent, queue: int) -> None:
        assert event.queue != queue, "a queue is in order without holding"
        if self.recording is not None:
            assert event in self.marked, "a capture waits for an event of before"
            self.open.discard(event)
            self.recording.append(partial(self._hold, event, queue))
        else:
            self.enqueue(Hold(event), queue)

    def use(self) -> None:
        pass

    def queue_at(self, stream: int) -> int:
        """The queue that has an address as a stream."""
        return LINKS + stream - self.stream

    def exchanging(self, queueing: Callable[[int], object], way: tuple[int, int] | None = None) -> tuple[Run, Run]:
        if way not in self.ways:
            self.ways.append(way)
            self.queues.append([])
        number = self.ways.index(way)
        begun, done = FakeEvent(self, MAIN), FakeEvent(self, LINKS + number)

        def begin() -> None:
            begun.record()
            self._hold(begun, LINKS + number)
            queueing(self.stream + number)
            done.record()
            if self.recording is not None:
                self.open.add(done)

        return begin, partial(self._hold, done, MAIN)

    def settle(self) -> None:
        event = FakeEvent(self, LINKS)
        event.record()
        self._hold(event, MAIN)

    def run_next(self, queue: int = MAIN) -> None:
        if queue > LINKS:  # it goes on beside the others
            assert comes_true(lambda: self.go_between(), 60), f"{self.ways[queue - LINKS]}: the other side never came"
            return
        waiting = self.queues[queue]
        if isinstance(hold := waiting[0], Hold):
            hold()  # nothing overtakes it meanwhile
            if waiting and waiting[0] is hold:
                waiting.pop(0)
        else:
            waiting.pop(0)()
        self._run_ahead()

    def synchronize(self) -> None:
        assert self.recording is None, "a wait cannot be captured"
        while self.queue:
            self.run_next()

    @contextlib.contextmanager
    def allocating_nothing(self) -> Iterator[None]:
        self.forbidden = True
        try:
            yield
        finally:
            self.forbidden = False


def multiply(product: Multiply, places: tuple[int, ...], workspace: int) -> None:
    """What cuBLASLt does, on host memory, with float64 sums; its workspace is left poisoned."""
    assert not product.nbytes or workspace % 256 == 0, "cuBLASLt wants its workspace so aligned"
    ctypes.memset(workspace, 0xFF, product.nbytes)
    for i in range(product.batch):
        a, b, c, d = (
            matrix_at(matrix, place, i) for matrix, place in zip((product.a, product.b, product.c, product.d), places)
        )
        left, right = a.T if product.transpose_a else a, b.T if product.transpose_b else b
        found = left.astype(np.float64) @ right.astype(np.float64)
        if product.adds:
            found += c.astype(np.float64)
        if product.bias is not None:
            assert places[4] % 16 == 0
            found += bias_at(places[4], product).astype(np.float64)[:, None]
        d[...] = found


def bias_at(place: int, product: Multiply) -> np.ndarray:
    """A number for each row of the result."""
    count, dtype = product.d.rows, product.d.dtype.numpy
    return np.ndarray(count, dtype, (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(place))


def matrix_at(matrix: Matrix, place: int, i: int) -> np.ndarray:
    """A matrix of a batch that begins at an address: its elements and nothing else."""
    item = matrix.dtype.itemsize
    assert matrix.leading >= matrix.rows
    span = ((matrix.columns - 1) * matrix.leading + matrix.rows) * item
    memory = (ctypes.c_uint8 * span).from_address(place + i * matrix.stride * item)
    return np.ndarray((matrix.rows, matrix.columns), matrix.dtype.numpy, memory, strides=(item, matrix.leading * item))
