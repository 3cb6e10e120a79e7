"""This machine's processor, and its measured speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from foreplan.base.processor import model, text_of
from foreplan.graph import TensorType, Window
from foreplan.graph.types import FLOAT32
from foreplan.ops.map import COPY
from foreplan.runtime import stopwatch
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.library import library
from foreplan.runtime.cpu.threads import set_threads, with_team
from foreplan.runtime.kernel import Refused, Run
from foreplan.runtime.stopwatch import SIDE, STREAM, TIMES

LINE = 64  # bytes


@dataclass(frozen=True)
class Machine:
    """A processor and the library on it.

    Attributes:
        model: the processor's own name.
        instruction_set: the one that oneDNN makes code for.
        onednn: the library's version.
        cores: those that this process may use.
        cache_bytes: of one core's second-level cache, and of the last-level cache, which cores share; 0: not known.
    """

    model: str
    instruction_set: str
    onednn: str
    cores: int
    cache_bytes: tuple[int, int]


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """The machine that this process runs on."""
    found = library()
    return Machine(model(), found.isa, found.version, len(os.sched_getaffinity(0)), (_cache(2), _cache(3)))


def _cache(level: int) -> int:
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if text_of(folder / "level").strip() == str(level):
            size = text_of(folder / "size").strip()
            return int(size.removesuffix("K")) * 1024 if size.endswith("K") else int(size or 0)
    return 0


def measured(threads: int) -> tuple[int, int]:
    """Operations and bytes a second, by the fastest kernels there are: of a large product of float32, and of a copy too
    large for any cache.
    """
    from foreplan.runtime.cpu.gemm.panels import Panels
    from foreplan.runtime.cpu.gemm.tiles import Tiles

    set_threads(threads)
    a, b, y = (np.ones((SIDE, SIDE), np.float32) for _ in range(3))
    matrix = Window.dense(TensorType(FLOAT32, (SIDE, SIDE)))
    found = []
    for make in (primitives.matmul, Tiles, Panels):
        with suppress(Refused):
            product = make(matrix, matrix, matrix)
            scratch = aligned(product.scratchpad)  # the run holds its address alone
            places = {c.SRC: a.ctypes.data, c.WEIGHTS: b.ctypes.data, c.DST: y.ctypes.data}
            if product.scratchpad:
                places[c.SCRATCHPAD] = scratch.ctypes.data
            found.append(least_seconds(product.bind(places), threads))
    source, target = np.ones(STREAM // 4, np.float32), np.zeros(STREAM // 4, np.float32)
    calls = (partial(np.copyto, target, source), copy(source, target, threads))
    stream = min(least_seconds(call, threads) for call in calls)
    return int(2 * SIDE**3 / min(found)), int(2 * STREAM / stream)


def copy(source: np.ndarray, target: np.ndarray, threads: int) -> Run:
    """A call that copies numbers of float32, each thread a part."""
    from foreplan.runtime.cpu.table import kernels_for

    row = Window.dense(TensorType(FLOAT32, source.shape))
    return kernels_for(COPY, [row], [row], threads)["lanes"].bind([source], [target], np.empty(0, np.uint8))


def least_seconds(
    call: Callable[[], object], threads: int, times: int = TIMES, before: Callable[[], object] | None = None
) -> float:
    """The least time of some calls, after one that is not counted: processor time where one thread works, as other work
    on the machine changes it less, else wall time. `before` runs before each, unmeasured.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    return with_team(partial(stopwatch.least_seconds, call, clock, times, before), threads)


def aligned(nbytes: int) -> np.ndarray:
    """Memory for kernels: uint8, from the beginning of a cache line on, content undefined."""
    raw = np.empty(nbytes + LINE, np.uint8)
    return raw[-raw.ctypes.data % LINE :][:nbytes]
