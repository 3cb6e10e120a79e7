"""The memory that a process on the host holds besides the arena of its step."""

from __future__ import annotations

import importlib.metadata
import mmap
import platform
from collections.abc import Mapping
from functools import lru_cache

from foreplan.base.calibration import Kind, Table, known
from foreplan.base.outside import REST, Basis, Part
from foreplan.base.units import align_up
from foreplan.lower.outside import Use, returned_bytes
from foreplan.lower.program import HOST, Program
from foreplan.ops.expr.functions import FUNCTIONS
from foreplan.planner.plan import Plan
from foreplan.runtime.loop import calls_of_loops

_ALWAYS = (
    "interpreter_bytes",
    "llvm_bytes",
    "planner_bytes",
    "planner_bytes_per_action",
    "numpy_bytes_per_instruction",
)
_OF_CPU = ("onednn_bytes", "cpu_bytes_per_instruction", "thread_bytes")  # where oneDNN is installed
_OF_LOOPS = ("numpy_bytes_per_loop_call", "cpu_bytes_per_loop_call")
PROCESSES = Kind(
    file="processes.toml",
    package="foreplan.runtime",
    key="machine",
    always=_ALWAYS,
    perhaps=(*_OF_CPU, *_OF_LOOPS),
    assumed=(*_ALWAYS, *_OF_CPU, *_OF_LOOPS),
    what="What processes hold on the host besides their arenas",
    page="docs/memory.md",
)
_LIBRARIES = {"numpy": "numpy", "llvmlite": "llvmlite", "onednn": "onednn-cpu-gomp"}  # as installed


def outside_on_host(
    program: Program, plan: Plan, use: Use, threads: int | None = None, table: Table | None = None
) -> tuple[Part, ...]:
    """The memory that a process holds besides the arena and its user's own arrays after a few steps; the sum is its
    resident memory. Compiled code is assumed to be in the cache; a process that compiles it takes more, once. The plan
    of a step that the process compiles is assumed not to be kept: where it is, the process takes less.

    Args:
        threads: of compiled loops; None: the step runs NumPy's kernels alone.
        table: by default the calibrations that come with foreplan, and the user's.
    """
    table, versions = table or processes(), versions_here()
    found, same = table.covers(machine(), versions)

    def part(name: str, key: str, count: int = 1) -> Part:
        basis: Basis = "assumed"
        if found is not None and key in found.figures:
            figure, basis = found.figures[key], "calibrated" if same else "assumed"
            source = "measured with " + ", ".join(f"{name} {text}" for name, text in found.versions.items())
        else:
            figure, source = table.assumed[key], "taken from another machine: this one was not calibrated"
        return Part(name, figure * count, basis, source)

    returned = returned_bytes(program) if use.returned is None else use.returned
    parts = [
        Part(
            REST,
            align_up(plan.arena_bytes, mmap.PAGESIZE) - plan.arena_bytes,
            "exact",
            f"memory is given out in pages of {mmap.PAGESIZE:,} bytes",
        ),
        Part("what a step returns", returned, "exact", "copies, until they are dropped"),
        part("interpreter, NumPy, foreplan", "interpreter_bytes"),
    ]
    if away := sum(plan.heights[HOST:]):
        parts.append(Part("what is copied off the arena", away, "exact", "host memory, which this target's own is"))
    if threads or use.compiles or _calls_compiled(program):
        parts.append(part("LLVM", "llvm_bytes"))
    if threads:
        parts.append(part("oneDNN and compiled loops", "onednn_bytes"))
    halves = [(program, plan)] if use.other is None else [(program, plan), use.other]
    instructions, engine = sum(len(planned.steps) for _, planned in halves), "cpu" if threads else "numpy"
    parts.append(part("instructions", f"{engine}_bytes_per_instruction", instructions))
    if calls := calls_of_loops(program, plan):
        parts.append(part("calls of loops", f"{engine}_bytes_per_loop_call", calls))
    if threads:
        parts.append(part("further threads", "thread_bytes", threads - 1))
    if use.compiles:
        parts.append(part("planner", "planner_bytes"))
        actions = sum(len(half.actions) for half, _ in halves)
        parts.append(part("graph and actions", "planner_bytes_per_action", actions))
    return tuple(parts)


def _calls_compiled(program: Program) -> bool:
    """Whether NumPy's kernels call a function that is compiled."""
    compiled = [name for name, function in FUNCTIONS.items() if function.is_compiled]
    return any(f"{name}(" in str(call.op) for call in program.calls for name in compiled)


def machine() -> str:
    """The name of this machine in calibrations of processes, such as `Linux x86_64`."""
    return f"{platform.system()} {platform.machine()}"


@lru_cache(maxsize=1)
def versions_here() -> Mapping[str, str]:
    """The versions of the libraries that a process holds, where they are installed."""
    found = {"python": platform.python_version()}
    for name, package in _LIBRARIES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processes() -> Table:
    """The calibrations of processes on the host that come with foreplan, and the user's.

    Raises:
        TargetError: the user's file cannot be read or is broken.
    """
    return known(PROCESSES)
