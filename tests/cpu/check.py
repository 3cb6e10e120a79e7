"""A CPU kernel against the op's own NumPy kernel, its memory poisoned and its surroundings watched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from foreplan.errors import TargetError
from foreplan.graph import Op, Window, as_dtype
from foreplan.runtime.cpu.kernel import CpuKernel
from foreplan.runtime.cpu.table import FAMILIES, kernels_for, reads_of
from foreplan.runtime.cpu.threads import set_threads
from tests.kernels import assert_near, expected, scratch
from tests.ops.check import type_of

THREADS = 1
MARGIN = 64


def needs_onednn() -> pytest.MarkDecorator:
    """Skip where oneDNN is not installed."""
    from foreplan.runtime.cpu.onednn.library import library

    try:
        library()
    except TargetError as error:
        return pytest.mark.skip(reason=str(error))
    return pytest.mark.filterwarnings("default")


def laid_out(array: np.ndarray, window: Window) -> np.ndarray:
    """A copy that lies as a window says, 64 bytes aligned, with watched bytes on both sides."""
    steps = [(extent - 1) * step for extent, step in zip(window.shape, window.strides)]
    low, high = -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    raw = np.full(low + high + array.itemsize + 3 * MARGIN, 0xA5, np.uint8)
    start = -raw.ctypes.data % 64 + MARGIN + low
    found = np.ndarray(array.shape, array.dtype, raw, start, window.strides)
    found[...] = array
    return found


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
    arrays = [laid_out(np.asarray(x), window) for x, window in zip(inputs, wanted)]
    outputs = [laid_out(np.full(type.shape, 77).astype(type.dtype.numpy), w) for type, w in zip(results, layouts)]
    if over is not None:
        assert over in kernel.overwrites
        outputs[over[0]] = arrays[over[1]]
    memory = scratch(kernel.workspace)
    set_threads(threads)
    call = kernel.bind(arrays, outputs, memory)
    call()
    first = [y.copy() for y in outputs]
    if over is None:
        memory[...] = 0x7F
        call()
        assert all(np.array_equal(a, b, equal_nan=as_dtype(a.dtype).is_float) for a, b in zip(first, outputs))
    return first


def kernel_for(op: Op, inputs: Sequence[Window], outputs: Sequence[Window], threads: int) -> CpuKernel | None:
    """The first kernel for an op, if there is any."""
    return next(iter(kernels_for(op, inputs, outputs, threads).values()), None)


def ways(op: Op, inputs: Sequence[np.ndarray], windows: Sequence[Window] | None = None) -> list[str]:
    """The names of all kernels for an op."""
    types = [type_of(x) for x in inputs]
    wanted = reads_of(op, windows or [Window.dense(type) for type in types], op.infer(types), THREADS)
    assert wanted is not None, f"no kernel for {op} of {types}"
    return list(kernels_for(op, wanted, FAMILIES[op.name].layout(op, wanted, op.infer(types)), THREADS))


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
    for way in ways(op, inputs, windows):
        assert_near(run(op, inputs, windows, over, way=way), wanted, rtol, atol, way)


def check_as_exact(op: Op, draws: Sequence[Sequence[np.ndarray]], norm: float) -> None:
    """Assert that errors, beside what float64 gives, are no more than NumPy's: over several draws, as of one either may
    be thrice as far off.

    Args:
        norm: how many times NumPy's the norm of all errors may be; the largest may be twice its largest.
    """
    found = []
    for given in draws:
        exact = expected(op, [x.astype(np.float64) if as_dtype(x.dtype).is_float else x for x in given])
        results = zip(run(op, given), expected(op, given), exact, strict=True)
        found.append([(ours - true, theirs - true) for ours, theirs, true in results])
    for pairs in zip(*found, strict=True):
        ours, theirs = (np.abs(each) for each in zip(*pairs))
        assert ours.max() <= 2 * theirs.max() + 1e-6
        assert np.linalg.norm(ours) <= norm * np.linalg.norm(theirs)
