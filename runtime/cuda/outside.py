"""The memory that a process holds on a card besides its arena: context, libraries, code, the captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from foreplan.base.calibration import Table
from foreplan.base.outside import REST, Basis, Part
from foreplan.base.units import align_up
from foreplan.lower.outside import Use
from foreplan.lower.program import Program
from foreplan.ops.collective import Begin
from foreplan.ops.point_to_point import BeginMessage, BeginSend
from foreplan.planner.plan import Plan
from foreplan.runtime.cuda.calibration import LIBRARIES, calibrations, libraries_of
from foreplan.runtime.cuda.code import device_of, instructions
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.libraries.driver import versions_beside

PAGE = 2 << 20  # bytes; a driver gives out device memory in such pages


def outside(program: Program, plan: Plan, use: Use) -> tuple[Part, ...]:
    """The memory that a session of a planned step holds on its card besides the arena."""
    device, table = device_of(program), calibrations()
    halves = [(program, plan)] if use.other is None else [(program, plan), use.other]
    nodes = sum(1 for half in halves for _ in instructions(*half, device))
    libraries = libraries_of(half.calls[step.action].kernel for half, planned in halves for step in planned.steps)
    versions = versions_beside(device.title) if table.knows(device.title) else {}
    begun = [call.op for half, _ in halves for call in half.calls_of(Begin)]
    return outside_arena(device, plan.arena_bytes, nodes, libraries, versions, table, connected(begun, device))


class Connected(NamedTuple):
    """What a card has of NCCL.

    Attributes:
        groups: communicators of cards that exchange among all of them.
        peers: other cards that this one sends to, or gets from, by itself.
    """

    groups: int = 0
    peers: int = 0


ALONE = Connected()


def connected(begun: Sequence[Begin], device: Device) -> Connected:
    """What exchanges take: those of one group share a communicator, and each way of messages has its own."""
    groups = {(op.ranks, op.stride) for op in begun if not isinstance(op, BeginMessage)}
    ways = {(op.peer, isinstance(op, BeginSend)) for op in begun if isinstance(op, BeginMessage)}
    return Connected(len(groups), max((_peers(op, device) for op in begun), default=0) + len(ways))


def _peers(op: Begin, device: Device) -> int:
    """Cards of the same node that a collective sends to by itself; others go around rings."""
    others = min(op.ranks, device.per_node or op.ranks) - 1
    return {"all_to_all": others, "shift": min(2, others)}.get(op.kind, 0)


def outside_arena(
    device: Device,
    arena_bytes: int,
    launches: int,
    libraries: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    table: Table | None = None,
    nccl: Connected = ALONE,
) -> tuple[Part, ...]:
    """The memory that a session holds on a card besides its arena; nvidia-smi shows the sum.

    Args:
        device: the card.
        arena_bytes: of the arena, which takes whole pages.
        launches: of the captured step; 0 where nothing is captured.
        libraries: those of LIBRARIES that the step calls.
        versions: known ones, of `driver`, `cuda`, `cudnn` and `cupy`.
        table: by default the calibrations that come with foreplan, and the user's.
        nccl: what it has of NCCL.

    Raises:
        TargetError: the user's calibrations cannot be read.
    """
    table = table or calibrations()
    found, same = table.covers(device.title, versions or {})
    threads = device.multiprocessors * device.threads_per_multiprocessor
    assumed = dict(table.assumed)
    assumed["context_bytes"] = align_up(assumed.pop("context_bytes_per_thread") * threads, PAGE)

    def part(name: str, key: str, count: int | None = None) -> Part:
        """A part of figures that grow with a count, in pages."""
        basis: Basis = "assumed"
        if found is not None and key in found.figures:
            figure, basis = found.figures[key], "calibrated" if same else "assumed"
            source = "measured with " + ", ".join(f"{name} {text}" for name, text in found.versions.items())
        else:
            figure = assumed[key]
            source = "taken from other cards and programs: this was not calibrated"
        return Part(name, figure if count is None else align_up(figure * count, PAGE), basis, source)

    rest = align_up(arena_bytes, PAGE) - arena_bytes
    return (
        Part(REST, rest, "exact", "device memory is given out in pages of 2 MiB"),
        part("context", "context_bytes"),
        part("code of kernels", "code_bytes"),
        *(part(name, f"{name}_bytes") for name in LIBRARIES if name in libraries),
        *([part("nccl", "nccl_bytes", nccl.groups)] if nccl.groups else []),
        *([part("nccl's buffers for others", "nccl_bytes_per_peer", nccl.peers)] if nccl.peers else []),
        part("captured graph", "graph_bytes_per_launch", launches),
    )
