"""The thin layer over CuPy: what it says where there is no card, and that it calls CuPy as CuPy wants to be called."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foreplan.base.errors import PlanError, TargetError
from foreplan.runtime.cuda.launch import Launch, Source
from foreplan.runtime.cuda.libraries import driver
from foreplan.runtime.cuda.libraries.driver import CupyCard
from tests.gpu import compiled
from tests.gpu.compiled import needs_gcc
from tests.gpu.stand_in import stand_in

WITHOUT_DRIVER = "InsufficientDriver|NoDevice|libcuda"


def test_a_card_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 13000)
    found = CupyCard()
    assert (found.title, found.capability, found.compute) == ("A card", "9.0", 90)
    assert found.bus == "0000:3B:00.0"


def test_versions_that_a_calibration_is_known_by(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 13000)
    nvml = SimpleNamespace(driver="580.105.08")
    wanted = {"driver": "580.105.08", "cuda": "13.2", "cupy": "14.2.0"}
    monkeypatch.setattr(driver, "missing", lambda: "it is not installed")
    assert driver.versions(nvml) == wanted  # type: ignore[arg-type]
    monkeypatch.setattr(driver, "missing", lambda: "")
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(version="9.19.1"))
    assert driver.versions(nvml) == wanted | {"cudnn": "9.19.1"}  # type: ignore[arg-type]


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        with pytest.raises(TargetError, match=r"CuPy.*cannot be imported.*foreplan\[cuda13\]"):
            CupyCard()
    for version, error, said in (
        (0, "", "no driver for an NVIDIA card"),
        (12080, "", r"up to CUDA 12.*CuPy is for CUDA 13.*foreplan\[cuda12\]"),
        (13000, "cudaErrorNoDevice: no CUDA-capable device", "no card to run on.*no CUDA-capable device"),
    ):
        stand_in(monkeypatch, version, error)
        with pytest.raises(TargetError, match=said):
            CupyCard()


class FakeStream:
    ptr = 7

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin_capture(self) -> None:
        self.said.append("begin")

    def end_capture(self) -> Any:
        self.said.append("end")
        return SimpleNamespace(upload=lambda stream: self.said.append("upload"), launch=self._launch)

    def is_capturing(self) -> bool:
        return self.said[-1:] == ["begin"]

    def _launch(self, stream: object) -> None:
        assert stream is self
        self.said.append("launch")


def unopened(cuda: Any) -> CupyCard:
    """A card that nobody has looked for."""
    made = object.__new__(CupyCard)
    made.cuda, made.number, made.compute, made.stream, made._handle = cuda, 0, 90, FakeStream(), None
    made._module, made._plan = made._load, made._read  # type: ignore[method-assign, assignment]
    return made


def test_calls_are_captured_and_a_capture_ends_whatever_happens() -> None:
    card = unopened(None)
    replay = card.captured([partial(card.stream.said.append, "a"), partial(card.stream.said.append, "b")])
    replay()
    replay()
    assert card.stream.said == ["begin", "a", "b", "end", "upload", "launch", "launch"]

    def fail() -> None:
        raise RuntimeError("cannot be captured")

    card.stream.said.clear()
    with pytest.raises(RuntimeError, match="cannot be captured"):
        card.captured([fail])
    assert card.stream.said == ["begin", "end"]


def test_copies_beside_have_a_stream_of_their_own_that_is_made_when_it_is_needed() -> None:
    said: list[tuple[object, ...]] = []

    class Stream:
        def __init__(self, non_blocking: bool) -> None:
            assert non_blocking
            self.ptr = 8

        def wait_event(self, event: object) -> None:
            said.append(("wait", self.ptr, event))

    class Event:
        def record(self, stream: Stream) -> None:
            said.append(("record", stream.ptr))

    runtime = SimpleNamespace(memcpyAsync=lambda *words: said.append(words), memcpyDefault=4)
    card = unopened(SimpleNamespace(runtime=runtime, Stream=Stream, Event=Event))
    card.copying(1, 2, 3)()
    assert said == [(1, 2, 3, 4, 7)] and "beside" not in vars(card)
    arrived = card.event(beside=True)
    card.copying(5, 6, 7, beside=True)()
    arrived.record()
    card.stream.wait_event = lambda event: said.append(("wait", 7, event))
    card.hold(arrived)
    moved = card.event()
    moved.record()
    card.hold(moved, beside=True)
    assert said[1:] == [
        (5, 6, 7, 4, 8),
        ("record", 8),
        ("wait", 7, arrived.event),  # type: ignore[attr-defined]
        ("record", 7),
        ("wait", 8, moved.event),  # type: ignore[attr-defined]
    ]


def test_exchanges_have_a_stream_of_their_own_and_events_keep_the_order() -> None:
    said: list[tuple[object, ...]] = []
    numbers = count(8)

    class Stream:
        def __init__(self, non_blocking: bool) -> None:
            assert non_blocking
            self.ptr = next(numbers)

        def wait_event(self, event: object) -> None:
            said.append(("wait", self.ptr, event))

        def record(self) -> str:
            said.append(("record", self.ptr))
            return "all of it"

    class Event:
        def __init__(self, disable_timing: bool) -> None:
            assert disable_timing

        def record(self, stream: Any) -> None:
            said.append(("record", stream.ptr, self))

    card = unopened(SimpleNamespace(Stream=Stream, Event=Event))
    card.stream.wait_event = lambda event: said.append(("wait", 7, event))
    card.settle()
    assert said == [], "nothing was exchanged"
    begin, end = card.exchanging(lambda stream: said.append(("exchange", stream)))
    assert said == []
    for _ in range(2):  # a step, and its capture
        begin()
        end()
        begun, done = said[0][2], said[3][2]
        assert said == [
            ("record", 7, begun),
            ("wait", 8, begun),
            ("exchange", 8),
            ("record", 8, done),
            ("wait", 7, done),
        ]
        assert begun is not done
        said.clear()
    begin, _ = card.exchanging(lambda stream: said.append(("exchange", stream)), (0, 1))
    begin()
    assert said[2] == ("exchange", 9), "another stream"
    said.clear()
    card.settle()
    assert said == [("record", 8), ("wait", 7, "all of it")], "a way to another card is not waited for"


AXPY = """
struct Arguments { float* x; long long count; double factor; };
extern "C" __global__ void scale(const Arguments a) {
    const long long i = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x;
    if (i < a.count) a.x[i] *= static_cast<float>(a.factor);
}
"""


@needs_gcc
def test_a_kernel_finds_its_arguments_where_the_driver_is_told_they_are() -> None:
    launched: list[tuple[Any, ...]] = []
    cuda = SimpleNamespace(driver=SimpleNamespace(launchKernel=lambda *words: launched.append(words)))
    card = unopened(cuda)
    module = SimpleNamespace(get_function=lambda entry: SimpleNamespace(ptr=11))
    card._module = lambda source, code: module  # type: ignore[assignment]
    launch = Launch(Source("types.cuh", (), AXPY), "scale", (3, 1, 1), (32, 1, 1), ())
    x = np.arange(70, dtype=np.float32)
    ready = card.launching(launch, struct.pack("<qqd", x.ctypes.data, 70, 0.5))
    ready()
    function, *extents, shared, stream, parameters, extra = launched[0]
    assert (function, extents, shared, stream, extra) == (11, [3, 1, 1, 32, 1, 1], 0, 7, 0)
    # What cuLaunchKernel does: an array of pointers, one a parameter, each to the parameter's value.
    (first,) = (ctypes.c_void_p * 1).from_address(parameters)
    run, _ = compiled.function(launch.source, "scale")
    grid, block = ((ctypes.c_uint * 3)(*each) for each in (extents[:3], extents[3:]))
    assert run(grid, block, 0, ctypes.string_at(first, 24)) is None
    np.testing.assert_array_equal(x, np.arange(70, dtype=np.float32) / 2)


def test_machine_code_that_is_given_is_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []
    module = SimpleNamespace(load=loaded.append, get_function=lambda entry: SimpleNamespace(ptr=entry))
    card = unopened(SimpleNamespace(Module=lambda: module))
    monkeypatch.setattr(driver, "cubin", lambda source, architecture: f"made for {architecture}".encode())
    source = Source("types.cuh", (), AXPY)
    assert card._load(source, b"given").get_function("scale").ptr == "scale"
    card._load(source, None)
    assert loaded == [b"given", b"made for sm_90"]


class FakeCudnn:
    """A cuDNN that takes plans which begin with a number: the bytes of workspace that they need."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.version = "9.99.0"
        self.module = self

    def create_handle(self) -> str:
        self.done.append("handle")
        return "the handle"

    def set_stream(self, handle: str, stream: int) -> None:
        self.done.append(("stream", handle, stream))

    def create_device_properties(self, device: int) -> Any:
        return SimpleNamespace(serialize=lambda: '{"driverVer":12090,"deviceVer":900}')

    def pygraph(self, handle: str) -> FakeCudnn:
        return self

    def deserialize(self, handle: str, blob: bytearray) -> None:
        assert type(blob) is bytearray
        self.needed = int(blob)  # a ValueError is one of the many errors that cuDNN has

    def get_workspace_size(self) -> int:
        return self.needed

    def execute(self, tensors: dict[int, int], workspace: int, handle: str) -> None:
        self.done.append((tensors, workspace, handle))


def test_plans_of_cudnn_are_read_once_and_held_against_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = FakeCudnn()
    monkeypatch.setattr(driver, "library", lambda: cudnn)
    card = unopened(None)
    run = card.executing(b"1000", {1: 256, 2: 512}, 4096, 1024)
    assert cudnn.done == ["handle", ("stream", "the handle", 7)]
    run()
    assert cudnn.done[2:] == [({1: 256, 2: 512}, 4096, "the handle")]
    card.executing(b"1000", {1: 0}, 0, 1000)
    assert cudnn.done.count("handle") == 1
    assert card.stream.said == []
    with pytest.raises(PlanError, match=r"cuDNN 9\.99\.0 needs 1000 bytes of workspace where 999 are planned"):
        card.executing(b"1000", {1: 0}, 0, 999)
    with pytest.raises(PlanError, match=r"cuDNN 9\.99\.0 does not take .* another version.*compile again"):
        card.executing(b"damaged", {1: 0}, 0, 999)

    def fail(handle: str, blob: bytearray) -> None:
        card.stream.begin_capture()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cudnn, "deserialize", fail)
    with pytest.raises(PlanError, match="out of memory"):
        card.executing(b"1000", {1: 0}, 0, 1000)
    assert card.stream.said == ["begin", "end"]


def cupys() -> Any:
    """CuPy, where it is installed and there is no driver: it then says so at every call whose arguments it can take."""
    cuda = pytest.importorskip("cupy.cuda", reason="CuPy is not installed: make setup-cuda")
    if cuda.runtime.driverGetVersion():
        pytest.skip("needs a machine without a driver; where there is one, tests marked cuda try the same")
    return cuda


@pytest.mark.cuda_wheels
def test_without_a_driver_that_is_said() -> None:
    cupys()
    with pytest.raises(TargetError, match="no driver for an NVIDIA card"):
        CupyCard()


@pytest.mark.cuda_wheels
def test_cupy_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = cupys()
    card = unopened(cuda)
    x = np.zeros(64, np.uint8)
    address = x.ctypes.data
    calls: dict[str, Callable[[], object]] = {
        "memory": card.memory,
        "allocate": lambda: card.allocate(1 << 20),
        "allocate_host": lambda: card.allocate_host(1 << 20),
        "copying": card.copying(address, address + 32, 32),
        "filling": card.filling(address, 0xFF, 64),
        "event": card.event,
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=WITHOUT_DRIVER):
            print(name, call())
    module = SimpleNamespace(get_function=lambda entry: SimpleNamespace(ptr=1 << 46))
    card._module = lambda source, code: module  # type: ignore[assignment]
    launch = Launch(Source("types.cuh"), "nothing", ((1 << 31) - 1, 65535, 65535), (1024, 1, 1), ())
    card.stream.ptr = 1 << 46
    with pytest.raises(RuntimeError, match=WITHOUT_DRIVER):
        card.launching(launch, bytes(64))()


@pytest.mark.cuda_wheels
def test_cupy_takes_our_machine_code() -> None:
    card = unopened(cupys())
    with pytest.raises(RuntimeError, match=WITHOUT_DRIVER):
        card._load(Source("types.cuh", (), AXPY), None)


@pytest.mark.cuda_wheels
def test_pinned_memory_is_an_array_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, alive = cupys(), [0]

    class Pinned:
        def __init__(self, nbytes: int, flags: int) -> None:
            assert flags == cuda.runtime.hostAllocPortable
            self.memory = np.zeros(nbytes, np.uint8)
            self.ptr, self.size = self.memory.ctypes.data, nbytes
            alive[0] += 1

        def __del__(self) -> None:
            alive[0] -= 1

    monkeypatch.setattr(cuda, "PinnedMemory", Pinned)
    found = unopened(cuda).allocate_host(1000)
    assert found.shape == (1000,) and found.dtype == np.uint8 and found.flags.writeable
    part = found[100:200]
    del found
    part.fill(7)
    assert alive == [1] and part.sum() == 700
    del part
    assert alive == [0]


@pytest.mark.cuda_wheels
def test_cupy_allocates_nothing_in_a_step() -> None:
    cupys()
    import cupy

    card = unopened(cupy.cuda)
    with card.allocating_nothing(), pytest.raises(RuntimeError, match="in the middle of a step"):
        cupy.empty(3)
    with pytest.raises(RuntimeError, match=WITHOUT_DRIVER):
        cupy.empty(3)


@pytest.fixture(autouse=True)
def nothing_opened() -> Iterator[None]:
    driver.card.cache_clear()
    yield
    driver.card.cache_clear()
