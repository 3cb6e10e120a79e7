"""The times of kernels on this machine: each measured once for an op and its layouts, and kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache, partial

import numpy as np

from foreplan.base.disk_cache import file_name, keep, kept
from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.runtime.cpu.codegen.flush import compiled_flush
from foreplan.runtime.cpu.kernel import CpuKernel
from foreplan.runtime.cpu.machine import LINE, Machine, aligned, copy, least_seconds, measured, this_machine
from foreplan.runtime.cpu.prices import CACHE
from foreplan.version import VERSION

ENOUGH = 0.05  # seconds after which no further run begins
LEAST, MOST = 3, 20  # runs, whatever they take


class Prices:
    """Nanoseconds of kernels, measured if they are not known yet.

    Attributes:
        machine: the one that is measured.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._file = file_name(f"{VERSION} {machine}", "json", "prices")
        data = json.loads(kept(self._file) or b"{}")
        self._known: dict[str, list[int]] = data.get("prices", {})

    def kernel(self, op: Op, name: str, kernel: CpuKernel, inputs: Windows, outputs: Windows, threads: int) -> int:
        """The time of one run of a kernel."""
        lie = " ".join(f"{w.type}/{','.join(map(str, w.strides))}" for w in (*inputs, *outputs))
        key = f"{op} {name} threads={threads} {lie}"
        return self._of(key, lambda: [round(_seconds(op, kernel, inputs, outputs, threads) * 1e9)])[0]

    def machine_rates(self, threads: int) -> tuple[int, int]:
        """Operations and bytes a second of `threads` threads."""
        flops, nbytes = self._of(_machine(threads), lambda: list(measured(threads)))
        return flops, nbytes

    def known_rates(self, threads: int) -> tuple[int, int] | None:
        """The machine's rates, if they were measured before."""
        found = self._known.get(_machine(threads))
        return None if found is None else (found[0], found[1])

    def _of(self, key: str, measure: Callable[[], list[int]]) -> list[int]:
        if key not in self._known:
            self._known[key] = measure()
            data = {"machine": asdict(self.machine), "prices": dict(sorted(self._known.items()))}
            keep(self._file, json.dumps(data, indent=0).encode())
        return self._known[key]


def _machine(threads: int) -> str:
    return f"machine threads={threads}"


@lru_cache(maxsize=1)
def prices() -> Prices:
    """The prices of this machine."""
    return Prices(this_machine())


def _seconds(op: Op, kernel: CpuKernel, inputs: Windows, outputs: Windows, threads: int) -> float:
    """The least time of some runs on made-up numbers, without that of a call; results overwrite the inputs that they
    may. What fits no core's cache is fetched from memory again, as in a step, where other kernels ran since.
    """
    rng = np.random.default_rng(0)
    types = [window.type for window in inputs]
    given = [_array(window, op.valid_range(i, types), rng) for i, window in enumerate(inputs)]
    results = [_array(window, None, None) for window in outputs]
    taken: set[tuple[str, int]] = set()
    for output, index in kernel.overwrites:
        if inputs[index] == outputs[output] and not {("out", output), ("in", index)} & taken:
            results[output] = given[index]
            taken |= {("out", output), ("in", index)}
    scratch = aligned(kernel.workspace)  # calls hold only addresses
    run = kernel.bind(given, results, scratch)
    nbytes = sum(window.type.nbytes for window in (*inputs, *outputs))
    before = partial(_flush, [*given, *results]) if nbytes > CACHE // 2 else None
    with np.errstate(all="ignore"):
        first = least_seconds(run, threads, 1, before)
        times = max(LEAST, min(MOST, int(ENOUGH / max(first, 1e-9))))
        least = min(first, least_seconds(run, threads, times, before))
    return max(least - _call(threads), least / 10)


def _flush(arrays: Sequence[np.ndarray]) -> None:
    """Let no cache hold them."""
    flush = compiled_flush()
    for x in arrays:
        span = sum((extent - 1) * step for extent, step in zip(x.shape, x.strides)) + x.itemsize if x.size else 0
        flush(0, -(-span // LINE), np.array([x.ctypes.data], np.int64).tobytes())


@lru_cache(maxsize=4)
def _call(threads: int) -> float:
    """Seconds of a call that does next to nothing: a step makes its calls in machine code."""
    source, target = (aligned(LINE).view(np.float32) for _ in range(2))
    return least_seconds(copy(source, target, threads), threads, MOST)


def _array(window: Window, valid: Sequence[int] | None, rng: np.random.Generator | None) -> np.ndarray:
    """Memory with the layout of a window, and numbers that its op can take."""
    type, item = window.type, window.type.dtype.itemsize
    span = sum((extent - 1) * step for extent, step in zip(type.shape, window.strides)) + item if type.size else 0
    raw = aligned(span)
    array = np.ndarray(type.shape, type.dtype.numpy, raw, 0, window.strides)
    if rng is None:
        return array
    flat = np.ndarray((span // item,), type.dtype.numpy, raw)
    if type.dtype.is_float:
        flat[:] = rng.standard_normal(min(flat.size, 65_537)).repeat(1 + flat.size // 65_537)[: flat.size]
    elif valid is not None:
        flat[:] = rng.integers(valid[0], valid[1], flat.size, endpoint=True)
    else:
        flat[:] = rng.integers(0, 2, flat.size)
    return array
