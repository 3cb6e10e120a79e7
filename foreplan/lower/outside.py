"""What lies outside the arena of a planned step: on a card, or on the host in the process that runs it."""

from __future__ import annotations

import importlib.metadata
import mmap
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from foreplan.calibration import Kind, Table, known
from foreplan.lower.program import HOST, Program
from foreplan.outside import Basis, Part
from foreplan.planner.plan import Plan
from foreplan.units import align_up

_ALWAYS = (
    "interpreter_bytes",
    "numba_bytes",
    "planner_bytes",
    "planner_bytes_per_action",
    "numpy_bytes_per_instruction",
)
_OF_CPU = ("onednn_bytes", "cpu_bytes_per_instruction", "thread_bytes")  # where oneDNN is installed
PROCESSES = Kind(
    file="processes.toml",
    package="foreplan.lower",
    key="machine",
    always=_ALWAYS,
    perhaps=_OF_CPU,
    assumed=(*_ALWAYS, *_OF_CPU),
    where="on the host",
    page="docs/memory.md",
)
_LIBRARIES = {"numpy": "numpy", "numba": "numba", "llvmlite": "llvmlite", "onednn": "onednn-cpu-gomp"}  # as installed


@dataclass(frozen=True)
class Use:
    """What a process does with a step, as far as its memory goes by it.

    Attributes:
        compiles: whether it has compiled the step; False: it has loaded the plan from a file.
        instructions: of the other half of a step that accumulates gradients.
        actions: likewise.
        returned: bytes of the arrays in one result; None: those of the program's own outputs and gradients.
    """

    compiles: bool = True
    instructions: int = 0
    actions: int = 0
    returned: int | None = None


def outside(program: Program, plan: Plan, use: Use | None = None) -> tuple[Part, ...]:
    """What a session of a planned step holds besides its arena: of its card; or where it runs on the host, in the whole
    process. Nothing is known of targets that are not foreplan's own.

    Raises:
        TargetError: what the user has measured cannot be read.
    """
    engine, _, _ = program.target.partition(":")
    if engine == "cuda":
        from foreplan.lower.cuda import outside as outside_on_card

        return outside_on_card(program, plan)
    return outside_on_host(program, plan, use or Use()) if engine in ("numpy", "cpu") else ()


def outside_on_host(program: Program, plan: Plan, use: Use, table: Table | None = None) -> tuple[Part, ...]:
    """What a process holds besides the arena and its user's own arrays, once it has run a few steps, so that the sum is
    its resident memory. Compiled code is taken to be in the cache; a process that compiles it takes more, once.

    Args:
        table: by default what comes with foreplan and what the user has measured.
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

    cpu = program.target.startswith("cpu")
    returned = returned_bytes(program) if use.returned is None else use.returned
    parts = [
        Part(
            "rest of the arena's last page",
            align_up(plan.arena_bytes, mmap.PAGESIZE) - plan.arena_bytes,
            "exact",
            f"memory is given out in pages of {mmap.PAGESIZE:,} bytes",
        ),
        Part("what a step returns", returned, "exact", "copies, until they are dropped"),
        part("interpreter, NumPy, foreplan", "interpreter_bytes"),
    ]
    if away := sum(plan.heights[HOST:]):
        parts.append(Part("what is copied off the arena", away, "exact", "host memory, which this target's own is"))
    if cpu or use.compiles:
        parts.append(part("Numba and LLVM", "numba_bytes"))
    if cpu:
        parts.append(part("oneDNN and compiled loops", "onednn_bytes"))
    instructions = len(plan.steps) + use.instructions
    parts.append(part("instructions", f"{'cpu' if cpu else 'numpy'}_bytes_per_instruction", instructions))
    if cpu:
        parts.append(part("further threads", "thread_bytes", _threads(program.target) - 1))
    if use.compiles:
        parts.append(part("planner", "planner_bytes"))
        parts.append(part("graph and actions", "planner_bytes_per_action", len(program.actions) + use.actions))
    return tuple(parts)


def returned_bytes(program: Program, micro_batches: int = 1) -> int:
    """Bytes of the arrays in one result of a step, which has the outputs of all micro-batches."""
    outputs = sum(slot.operand.type.nbytes for slot in program.outputs)
    return outputs * micro_batches + sum(slot.operand.type.nbytes for slot in program.gradients)


def _threads(target: str) -> int:
    """As `cpu:threads=2` has it."""
    return int(target.partition("threads=")[2] or 1)


def machine() -> str:
    """What calibrations of processes on this machine go by, such as `Linux x86_64`."""
    return f"{platform.system()} {platform.machine()}"


@lru_cache(maxsize=1)
def versions_here() -> Mapping[str, str]:
    """Of what a process holds, where it is installed."""
    found = {"python": platform.python_version()}
    for name, package in _LIBRARIES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processes() -> Table:
    """What comes with foreplan and what the user has measured, of processes on the host.

    Raises:
        TargetError: the user's file cannot be read or is broken.
    """
    return known(PROCESSES)
