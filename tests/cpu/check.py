"""A CPU kernel against the op's own NumPy kernel, its memory poisoned and its surroundings watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from foreplan.base.errors import TargetError
from foreplan.graph import Op, Window, as_dtype
from foreplan.lower import Program
from foreplan.runtime.cpu.kernel import CpuKernel
from foreplan.runtime.cpu.table import FAMILIES, kernels_for, reads_of
from foreplan.runtime.cpu.threads import set_threads
from tests.kernels import assert_near, expected, scratch
from tests.ops.check import type_of

THREADS = 1
MARGIN, WATCHED = 64, 0xA5


def needs_onednn() -> pytest.MarkDecorator:
    """Skip where oneDNN is not installed."""
    from foreplan.runtime.cpu.onednn.library import library

    try:
        library()
    except TargetError as error:
        return pytest.mark.skip(reason=str(error))
    return pytest.mark.filterwarnings("default")


def notes_of(program: Program) -> list[str]:
    """Notes of a program, without that of a processor which was not measured."""
    return [note for note in program.notes if "times are predicted as of" not in note]


def instruction_set() -> str:
    """The one that oneDNN makes code for; none where it is not installed."""
    from foreplan.runtime.cpu.onednn.library import library

    try:
        return library().isa
    except TargetError:
        return ""


class Placed:
    """An array that lies as a window says, in memory that is watched, some elements behind a line's beginning."""

    def __init__(self, window: Window, content: np.ndarray | None, behind: int = 0) -> None:
        type, item = window.type, window.type.dtype.itemsize
        low, high = span(window)
        raw = np.full(high - low + 2 * MARGIN + 64 + behind * item, WATCHED, np.uint8)
        start = -(raw.ctypes.data - low) % 64 + MARGIN - low + behind * item
        self.raw = raw
        self.array = np.ndarray(type.shape, type.dtype.numpy, raw, start, window.strides)
        self.own = np.zeros(len(raw), bool)
        bytes_ = np.ndarray((*type.shape, item), np.uint8, raw, start, (*window.strides, 1))
        mask = np.ndarray((*type.shape, item), bool, self.own, start, (*window.strides, 1))
        mask[...] = True
        bytes_[...] = 0x7E
        self.content = content
        self.fill()

    def fill(self) -> None:
        """Let an input have its content."""
        if self.content is not None:
            self.array[...] = self.content

    def clear(self) -> None:
        """Let it hold anything."""
        self.raw[self.own] = 0x7E

    def check(self, what: str) -> None:
        """Raise where something else was written."""
        assert (self.raw[~self.own] == WATCHED).all(), f"{what}: wrote outside its elements"


def span(window: Window) -> tuple[int, int]:
    """Bytes before the first element, as less than 0, and to the end of the last."""
    reach = [(extent - 1) * step for extent, step in zip(window.shape, window.strides)] if window.type.size else []
    return sum(min(0, step) for step in reach), sum(max(0, step) for step in reach) + window.type.dtype.itemsize


def laid_out(array: np.ndarray, window: Window) -> np.ndarray:
    """A copy that lies as a window says, in memory that is watched."""
    return Placed(window, array).array


def run_kernel(
    kernel: CpuKernel,
    reads: Sequence[Window],
    writes: Sequence[Window],
    inputs: Sequence[np.ndarray],
    over: tuple[int, int] | None = None,
    threads: int = THREADS,
    behind: int = 0,
    where: str = "",
) -> list[np.ndarray]:
    """What a kernel gives for inputs and outputs that lie so: the same twice over, whatever its memory holds, and
    nothing else is written.

    Args:
        over: (output, input): the output takes that input's bytes, as the kernel says it may.
        behind: elements from the beginning of a line to where inputs begin.
        where: begins the message of an error.
    """
    given, outputs = [Placed(window, x, behind) for window, x in zip(reads, inputs)], [Placed(y, None) for y in writes]
    before = [x.array.tobytes() for x in given]
    if over is not None:
        assert over in kernel.overwrites
        outputs[over[0]] = given[over[1]]
    memory = scratch(kernel.workspace + 2 * MARGIN)
    memory[...] = WATCHED
    own = memory[MARGIN : MARGIN + kernel.workspace]
    own[...] = 0xFF
    set_threads(threads)
    for x in given:  # as when a session binds: what a kernel reads is not there yet
        x.clear()
    call = kernel.bind([x.array for x in given], [y.array for y in outputs], own)
    for x in given:
        x.fill()
    call()
    first = [y.array.copy() for y in outputs]
    for each in (*given, *outputs):
        each.check(where)
    around = np.concatenate([memory[:MARGIN], memory[MARGIN + own.size :]])
    assert (around == WATCHED).all(), (
        f"{where}: wrote {np.flatnonzero(around != WATCHED)} beside {own.size} of workspace"
    )
    for i, (x, content) in enumerate(zip(given, before)):
        taken = over is not None and over[1] == i
        assert taken or x.array.tobytes() == content, f"{where}: changed input {i}"
    if over is None:
        own[...] = 0x7F
        call()
        for y, array in zip(outputs, first):
            assert y.array.tobytes() == array.tobytes(), f"{where}: another result the second time"
    return first


def run(
    op: Op,
    inputs: Sequence[np.ndarray],
    windows: Sequence[Window] | None = None,
    over: tuple[int, int] | None = None,
    threads: int = THREADS,
    way: str = "",
) -> list[np.ndarray]:
    """What the CPU kernel gives, twice over.

    Args:
        windows: how inputs lie; by default as lowering would have them.
        over: (output, input): the output takes that input's bytes, as the kernel says it may.
        way: the kernel's name; by default the first of the family's.
    """
    types = [type_of(x) for x in inputs]
    results = op.infer(types)
    wanted = reads_of(op, windows or [Window.dense(type) for type in types], results, threads)
    assert wanted is not None, f"no kernel for {op} of {types}"
    layouts = FAMILIES[op.name].layout(op, wanted, results)
    found = kernels_for(op, wanted, layouts, threads)
    assert found, f"no kernel for {op} of {wanted}"
    kernel = found[way] if way else next(iter(found.values()))
    return run_kernel(kernel, wanted, layouts, inputs, over, threads)


def kernel_for(op: Op, inputs: Sequence[Window], outputs: Sequence[Window], threads: int) -> CpuKernel | None:
    """The first kernel for an op, if there is any."""
    return next(iter(kernels_for(op, inputs, outputs, threads).values()), None)


def ways(op: Op, inputs: Sequence[np.ndarray], windows: Sequence[Window] | None = None) -> list[str]:
    """The names of all kernels for an op."""
    types = [type_of(x) for x in inputs]
    wanted = reads_of(op, windows or [Window.dense(type) for type in types], op.infer(types), THREADS)
    assert wanted is not None, f"no kernel for {op} of {types}"
    return list(kernels_for(op, wanted, FAMILIES[op.name].layout(op, wanted, op.infer(types)), THREADS))


def results(
    op: Op,
    inputs: Sequence[np.ndarray],
    windows: Sequence[Window] | None = None,
    over: tuple[int, int] | None = None,
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """What every kernel of the CPU gives, by its name."""
    for way in ways(op, inputs, windows):
        yield way, run(op, inputs, windows, over, way=way)


def check(
    op: Op,
    *inputs: np.ndarray,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    windows: Sequence[Window] | None = None,
    over: tuple[int, int] | None = None,
) -> None:
    """Assert that every kernel of the CPU agrees with NumPy's."""
    wanted = expected(op, inputs)
    for way, found in results(op, inputs, windows, over):
        assert_near(found, wanted, rtol, atol, way)


def check_as_exact(
    op: Op,
    draws: Sequence[Sequence[np.ndarray]],
    norm: float,
    peer: Callable[[Op, Sequence[np.ndarray]], Sequence[np.ndarray]] = expected,
) -> None:
    """Assert that errors, beside what float64 gives, are no more than a peer's: over several draws, as of one either
    may be thrice as far off.

    Args:
        norm: how many times the peer's the norm of all errors may be; the largest may be twice its largest.
        peer: by default NumPy's kernel.
    """
    found = []
    for given in draws:
        exact = expected(op, [x.astype(np.float64) if as_dtype(x.dtype).is_float else x for x in given])
        results = zip(run(op, given), peer(op, given), exact, strict=True)
        found.append([(ours - true, theirs - true) for ours, theirs, true in results])
    for pairs in zip(*found, strict=True):
        ours, theirs = (np.abs(each) for each in zip(*pairs))
        assert ours.max() <= 2 * theirs.max() + 1e-6
        assert np.linalg.norm(ours) <= norm * np.linalg.norm(theirs)
