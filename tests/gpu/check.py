"""Kernels of cuda/, run on the CPU, against the NumPy kernels: memory is poisoned, and what is around it watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreplan.base import disk_cache
from foreplan.graph import Op, TensorType, Window
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.kernels import lt
from foreplan.runtime.cuda.launch import USUAL, Instruction, LaunchKernel
from foreplan.runtime.cuda.libraries.cudnn import missing
from foreplan.runtime.cuda.table import OWN, family_of, kernel_named
from tests.gpu.binder import Bound
from tests.gpu.compiled import compile_launched
from tests.kernels import assert_near, expected
from tests.ops.check import type_of

DEVICE = device_named("h100")
MARGIN = 512
WATCHED = 0xA5
_gathered: list[Instruction] | None = None  # within `gathering`


def needs_cudnn() -> pytest.MarkDecorator:
    """Skip where cuDNN is not installed, which is loaded to see that."""
    return pytest.mark.skipif(bool(missing()), reason=missing())


def asking_anew(cached: Any) -> Any:
    """A fixture for a module whose tests ask cuDNN anew: no answers on disk, and none in a cached function."""

    @pytest.fixture(autouse=True)
    def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path / "kept")
        cached.cache_clear()
        yield
        cached.cache_clear()

    return nothing_kept


def with_cudnn(test: Callable[..., None]) -> Callable[..., None]:
    """A test of cuDNN's plans, without a card."""
    return pytest.mark.cuda_wheels(needs_cudnn()(test))


class Memory:
    """Bytes of one operand, `behind` an address that is 256 bytes aligned, with watched bytes on both sides."""

    def __init__(self, nbytes: int, fill: int, behind: int = 0) -> None:
        self.nbytes = nbytes
        self.raw = np.full(nbytes + 3 * MARGIN, WATCHED, np.uint8)
        self.start = -self.raw.ctypes.data % 256 + MARGIN + behind
        self.bytes = self.raw[self.start : self.start + nbytes]
        self.bytes[...] = fill

    def check(self) -> None:
        """Assert that nothing was written around it."""
        around = (self.raw[: self.start], self.raw[self.start + self.nbytes :])
        assert all((part == WATCHED).all() for part in around), "written outside an output or the workspace"


def laid_out(window: Window, array: np.ndarray | None = None, behind: int = 0) -> tuple[Memory, np.ndarray]:
    """Memory and an array in it that lies as a window says: a copy, or poison.

    Args:
        behind: elements from an aligned place to where it begins.
    """
    steps = [(extent - 1) * step for extent, step in zip(window.shape, window.strides)]
    low = -sum(step for step in steps if step < 0)
    span = low + sum(step for step in steps if step > 0) + window.type.dtype.itemsize
    memory = Memory(span if window.type.size else 0, 0xFF, behind * window.type.dtype.itemsize)
    found = np.ndarray(
        window.shape, window.type.dtype.numpy, memory.bytes, low if window.type.size else 0, window.strides
    )
    if array is not None:
        found[...] = array
    return memory, found


def made(
    op: Op, types: Sequence[TensorType], windows: Sequence[Window] | None = None, name: str = OWN
) -> tuple[LaunchKernel, list[Window], list[Window]]:
    """The kernel of a name, and how inputs and outputs lie, with inputs given so: by default in C order."""
    results = op.infer(types)
    family = family_of(op)
    assert family is not None, f"no kernel for {op}"
    given = [Window.dense(type) for type in types] if windows is None else list(windows)
    wanted = [family.reads(op, i, window) for i, window in enumerate(given)]
    layouts = list(family.layout(op, wanted, results))
    kernel = kernel_named(op, name, b"", wanted, layouts, DEVICE)
    assert kernel is not None, f"no kernel {name!r} for {op} of {wanted}"
    return kernel, wanted, layouts


def run(
    op: Op,
    inputs: Sequence[np.ndarray],
    windows: Sequence[Window] | None = None,
    over: tuple[int, int] | None = None,
    name: str = OWN,
    behind: Sequence[int] = (),
) -> list[np.ndarray]:
    """What the kernel gives: the same, whether threads run forward or in reverse, and whatever the workspace holds.

    Args:
        windows: how inputs lie; by default in C order.
        over: (output, input): the output takes that input's bytes, as the kernel says it may.
        name: of the kernel; by default that of ours.
        behind: elements by which inputs, and then outputs, begin behind an aligned address; by default none.
    """
    kernel, wanted, layouts = made(op, [type_of(x) for x in inputs], windows, name)
    if _gathered is not None:
        _gathered.extend(kernel.instructions)
        return expected(op, inputs)
    return run_kernel(kernel, wanted, layouts, inputs, over, behind)


def run_kernel(
    kernel: LaunchKernel,
    reads: Sequence[Window],
    writes: Sequence[Window],
    inputs: Sequence[np.ndarray],
    over: tuple[int, int] | None = None,
    behind: Sequence[int] = (),
    **more: Op,
) -> list[np.ndarray]:
    """As `run`, of a kernel for inputs and outputs that lie so.

    Args:
        more: `op`, whose NumPy kernel stands in for a plan of cuDNN's.
    """
    shifts, found = [*behind, *[0] * (len(reads) + len(writes) - len(behind))], []
    for reverse, fill in ((False, 0xFF), (True, 0x7F)):
        places = [laid_out(window, x, shift) for window, x, shift in zip(reads, inputs, shifts)]
        results = [laid_out(window, None, shift) for window, shift in zip(writes, shifts[len(reads) :])]
        if over is not None:
            assert over in kernel.overwrites
            results[over[0]] = places[over[1]]
        workspace = Memory(kernel.workspace, fill)
        arrays = [array for _, array in places], [array for _, array in results]
        Bound(kernel, *arrays, workspace.bytes, reverse, **more)()
        for memory in (*(memory for memory, _ in (*places, *results)), workspace):
            memory.check()
        for i, ((_, array), x) in enumerate(zip(places, inputs)):
            taken = over is not None and over[1] == i
            assert taken or array.tobytes() == x.tobytes(), f"input {i} was written"
        found.append([array.copy() for _, array in results])
    for first, second in zip(*found):
        assert first.tobytes() == second.tobytes(), "the order of threads, or what the workspace holds, matters"
    return found[0]


def results(
    op: Op,
    inputs: Sequence[np.ndarray],
    windows: Sequence[Window] | None = None,
    over: tuple[int, int] | None = None,
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """What every kernel but cuDNN's gives, by its name."""
    own, reads, writes = made(op, [type_of(x) for x in inputs], windows)
    found = {OWN: own} | by_cublaslt(op, reads, writes)
    instructions = [each for kernel in found.values() for each in kernel.instructions]
    if _gathered is not None:
        _gathered.extend(instructions)
        return
    compile_launched(instructions)
    for name, kernel in found.items():
        yield name, run_kernel(kernel, reads, writes, inputs, over)


def by_cublaslt(op: Op, reads: Sequence[Window], writes: Sequence[Window]) -> Mapping[str, LaunchKernel]:
    """The kernels of cuBLASLt that the table of families has for an op: a plan may choose these."""
    family = family_of(op)
    libraries = [library for library in family.libraries if library.name == lt.CUBLASLT] if family else []
    return {
        name: kernel
        for library in libraries
        for name, kernel in library.kernels(op, reads, writes, DEVICE, USUAL).items()
    }


@contextlib.contextmanager
def gathering() -> Iterator[list[Instruction]]:
    """Gather the instructions of kernels; meanwhile `run` gives what NumPy's kernel does, and `results` nothing."""
    global _gathered
    _gathered = found = []
    try:
        yield found
    finally:
        _gathered = None


def check(
    op: Op,
    *inputs: np.ndarray,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    windows: Sequence[Window] | None = None,
    over: tuple[int, int] | None = None,
    name: str = OWN,
    behind: Sequence[int] = (),
) -> None:
    """Assert that both kernels agree."""
    assert_near(run(op, inputs, windows, over, name, behind), expected(op, inputs), rtol, atol)


def check_unaligned(
    op: Op, *inputs: np.ndarray, windows: Sequence[Window] | None = None, rtol: float = 1e-5, atol: float = 1e-5
) -> None:
    """Assert that both kernels agree while each operand in turn begins an element behind an aligned address."""
    count = len(inputs) + len(op.infer([type_of(x) for x in inputs]))
    for late in range(count):
        behind = [int(i == late) for i in range(count)]
        check(op, *inputs, rtol=rtol, atol=atol, windows=windows, behind=behind)
