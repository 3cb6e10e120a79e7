"""Every kernel that the cpu engine has for a case: one thread and several, as the case lies, in C order and with
channels last, inputs at any element's address, each legal overwrite, its memory poisoned and everything around it
watched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import pytest

from foreplan.base.errors import TargetError
from foreplan.base.units import align_up
from foreplan.graph import TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.runtime.cpu.kernel import CpuKernel
from foreplan.runtime.cpu.kernels.elementwise import IMAGES
from foreplan.runtime.cpu.onednn.library import library
from foreplan.runtime.cpu.table import FAMILIES, family_of, kernels_for
from tests.cpu.check import run_kernel, span
from tests.kernels import scratch
from tests.sweep.bounds import Expected, complaint, expectation, of_kernel
from tests.sweep.case import Case
from tests.sweep.table import ENTRIES, Entry

SEVERAL = (2, 3, 5)  # threads


def serves(entry: Entry, name: str) -> bool:
    """Whether the engine has kernels for an op."""
    return name in FAMILIES


def require() -> None:
    """Skip where oneDNN is not installed."""
    try:
        library()
    except TargetError as error:
        pytest.skip(str(error))


Lying = tuple[
    int, list[Window], Sequence[Window], str, CpuKernel
]  # threads, how inputs and outputs lie, a kernel by name


def judge(case: Case, chosen: Iterable[Lying]) -> int:
    """Raise AssertionError where a kernel's result is further off than it may be; give how many kernels there are."""
    arrays = case.arrays()
    wanted: dict[str, list[Expected]] = {}
    judged = 0
    given = _with_bits_in_order(case, arrays)
    for threads, reads, writes, way, kernel in chosen:
        if not wanted:
            entry = ENTRIES[case.op.name]
            wanted[""] = expectation(case.op, entry.oracle, entry.rule, arrays, "cpu")
            _put_bits_in_order(case, wanted[""])
        if way not in wanted:
            wanted[way] = of_kernel(case.op, wanted[""], arrays, way)
        for over in (None, *kernel.overwrites):
            where = f"{way}, {threads} threads" + (f", {over[0]} in place of {over[1]}" if over else "")
            behind = case.number // len(SEVERAL) % 4 if over is None else 0  # only whole values are overwritten
            _run(kernel, given, reads, writes, wanted[way], over, threads, behind, where)
        judged += 1
    return judged


def kernels(case: Case) -> Iterator[Lying]:
    """All kernels."""
    results = case.op.infer(case.types)
    for threads in (1, SEVERAL[case.number % len(SEVERAL)]):
        family = family_of(case.op, case.types, results, threads)
        drawn = [[given.window() for given in case.inputs]]
        for windows in (_layouts(case) if threads == 1 else drawn) if family else ():
            reads = [family.reads(case.op, i, window) for i, window in enumerate(windows)]
            writes = family.layout(case.op, reads, results)
            for way, kernel in kernels_for(case.op, reads, writes, threads).items():
                yield threads, reads, writes, way, kernel


def _in_order(bits: np.ndarray, shape: tuple[int, ...], images: tuple[int, ...]) -> np.ndarray:
    """A mask in C order as an engine has it: of images, in the order of channels last.

    Args:
        images: numbers of axes of what the engine takes as images.
    """
    if len(shape) not in images:
        return bits
    truth = np.unpackbits(bits, bitorder="little").reshape(shape)
    return np.packbits(np.moveaxis(truth, 1, -1).reshape(-1), bitorder="little")


def _with_bits_in_order(case: Case, arrays: list[np.ndarray], images: tuple[int, ...] = IMAGES) -> list[np.ndarray]:
    if case.op.name != "masked_map":
        return arrays
    return [_in_order(arrays[0], case.op.infer(case.types)[0].shape, images), *arrays[1:]]


def _put_bits_in_order(case: Case, wanted: Sequence[Expected], images: tuple[int, ...] = IMAGES) -> None:
    if case.op.name == "pack_bits":
        wanted[0].values = _in_order(wanted[0].values, case.types[0].shape, images)


def _layouts(case: Case) -> Iterator[list[Window]]:
    """As the case says; and images with their channels last, or all in C order, if that is not what it says."""
    found = [[given.window() for given in case.inputs]]
    for lie in (channels_last, Window.dense):
        windows = [lie(type) for type in case.types]
        if windows not in found:
            found.append(windows)
    yield from found


def _run(
    kernel: CpuKernel,
    arrays: Sequence[np.ndarray],
    reads: Sequence[Window],
    writes: Sequence[Window],
    wanted: Sequence[Expected],
    over: tuple[int, int] | None,
    threads: int,
    behind: int,
    where: str,
) -> None:
    if over is not None and not _alike(reads[over[1]], writes[over[0]]):
        return  # lowering gives it no such right
    first = run_kernel(kernel, reads, writes, arrays, over, threads, behind, where)
    if over is None:
        for y, before in zip(_side_by_side(kernel, arrays, reads, writes), first):
            assert y.tobytes() == before.tobytes(), f"{where}: another result where memory lies side by side"
    for i, (y, each) in enumerate(zip(first, wanted, strict=True)):
        wrong = complaint(y, each)
        assert wrong is None, f"output {i} by {where}: {wrong}"


def _side_by_side(
    kernel: CpuKernel, arrays: Sequence[np.ndarray], reads: Sequence[Window], writes: Sequence[Window]
) -> list[np.ndarray]:
    """The outputs where operands and workspace begin in the line behind the one before, as a plan may place them."""
    spans = [span(window) for window in (*reads, *writes)]
    starts = [0, *accumulate(align_up(high - low, 64) for low, high in spans)]
    memory = scratch(starts[-1] + kernel.workspace)
    placed = [
        np.ndarray(
            window.shape, window.type.dtype.numpy, memory, start - low if window.type.size else 0, window.strides
        )
        for window, start, (low, _) in zip((*reads, *writes), starts, spans)
    ]
    call = kernel.bind(placed[: len(reads)], placed[len(reads) :], memory[starts[-1] :])
    for x, content in zip(placed, arrays):
        x[...] = content
    call()
    return placed[len(reads) :]


def _alike(a: Window, b: Window) -> bool:
    """The same places for the same elements; the stride of an axis of extent 1 means nothing."""
    type: TensorType = a.type
    steps = zip(type.shape, a.strides, b.strides)
    return a.type == b.type and (type.size <= 1 or all(n == 1 or one == other for n, one, other in steps))
