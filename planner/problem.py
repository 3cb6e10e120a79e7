"""A planner's question: values with bytes, and actions that read and write them. Integers only.

Glossary:
    value     bytes with one content, written once (SSA); a recomputed value has the same content again.
    action    something the engine can run; a plan runs a sequence of them. Several actions may write the same value
              (kernel candidates, recompute forms, a copy back from the host): any one of them will do.
    region    a separately addressed stretch of memory; offsets are relative to their region.
    arena     all regions of the device together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np

from foreplan.base.units import format_bytes

ALIGNMENT = 64  # at least, of every workspace, every stored value and the height of a region


class Role(IntEnum):
    """When a value has its content without any action having written it, and when it must still have it."""

    TRANSIENT = 0  # written and read within the step
    INPUT = 1  # there when the step begins; its bytes are free after the last read
    OUTPUT = 2  # must be there when the step ends
    STORED = 3  # there when the step begins, and its bytes belong to it (or its `home` successor) throughout


class Category(StrEnum):
    """What people call the bytes, in the order in which tables show them."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"
    COMMUNICATION = "communication"
    INPUTS = "inputs"
    OUTPUTS = "outputs"


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of memory.

    Attributes:
        name: for people: `persistent`, `arena`, `host`.
        on_device: whether its height counts toward the arena's (host memory does not).
    """

    name: str
    on_device: bool = True


@dataclass(frozen=True, slots=True)
class Value:
    """Bytes with one content.

    Attributes:
        name: for people; unique.
        nbytes: size.
        alignment: its offset is a multiple of this power of two.
        region: index into the problem's regions.
        category: what people call it.
        role: when its content is there, and when it must be.
        home: the STORED value whose bytes this one must take, being its content for the next step; or -1.
        kept: it is written once, and there until its last read: never computed again, nor copied off the device.
        copy_of: the value whose content this one has once more, computed again or copied; or -1. An action that writes
            such values alone counts as recomputation, and none that reads or writes the other one runs again.
    """

    name: str
    nbytes: int
    alignment: int = 64
    region: int = 0
    category: Category = Category.ACTIVATIONS
    role: Role = Role.TRANSIENT
    home: int = -1
    kept: bool = False
    copy_of: int = -1


@dataclass(frozen=True, slots=True)
class Overwrite:
    """An action's right (or duty) to let a write take the bytes of a read, which then is gone.

    Attributes:
        write: index into the action's writes.
        read: index into the action's reads.
        required: the action works in no other way: an update in place, an accumulation (beta = 1).
    """

    write: int
    read: int
    required: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A read that may lie within a write from the start, where the action leaves it: a concatenation in place.

    Attributes:
        write: index into the action's writes.
        read: index into the action's reads.
        offset: byte of the write at which the read's first then lies.
    """

    write: int
    read: int
    offset: int


@dataclass(frozen=True, slots=True)
class Action:
    """One thing an engine can run.

    Attributes:
        name: for people; the graph's node.
        reads: values whose content it needs, each once.
        writes: values it gives their content.
        overwrites: which writes may or must take the bytes of which reads.
        workspace: bytes of scratch memory in region `workspace_region`, needed while it runs.
        flops: floating-point operations, multiply-add = 2.
        nbytes: bytes moved.
        nanoseconds: predicted on the target.
        effect: it must run exactly once (an update); pure actions may run any number of times.
        parts: which reads may lie within which writes from the start. Such a read is gone after the action; the action
            copies the others.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: tuple[Overwrite, ...] = ()
    workspace: int = 0
    workspace_region: int = 0
    flops: int = 0
    nbytes: int = 0
    nanoseconds: int = 0
    effect: bool = False
    parts: tuple[Part, ...] = ()


def _ids(values: tuple[int, ...]) -> str:
    return "(" + " ".join(f"v{value}" for value in values) + ")"


@dataclass(frozen=True)
class Problem:
    """Values, actions (listed in an order in which they can run) and regions.

    The planner chooses which actions run, in what order, how often, and where every value lies while it lives, so
    that every OUTPUT and every value with a home has its content at the end and every effect has happened once.
    """

    values: tuple[Value, ...]
    actions: tuple[Action, ...]
    regions: tuple[Region, ...] = (Region("arena"),)

    @cached_property
    def unit(self) -> int:
        """Every workspace's offset and every height is a multiple of this number of bytes: the largest alignment of any
        value. So regions that lie one above another stay aligned.
        """
        return max([ALIGNMENT, *(value.alignment for value in self.values)])

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the actions that can write it, in order."""
        return self._by_value([action.writes for action in self.actions])

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the actions that read it, in order."""
        return self._by_value([action.reads for action in self.actions])

    def _by_value(self, touched: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """For each value, the actions that touch it, of what each action does."""
        lists: list[list[int]] = [[] for _ in self.values]
        for i, values in enumerate(touched):
            for value in values:
                lists[value].append(i)
        return tuple(map(tuple, lists))

    @cached_property
    def round_trips(self) -> dict[int, tuple[int, int]]:
        """By value, the actions that copy it out of the device's memory and back.

        The first reads this value alone and writes a value off the device. Only the second reads that, and no other
        action writes it.
        """
        found: dict[int, tuple[int, int]] = {}
        for back, action in enumerate(self.actions):
            if len(action.reads) != 1 or len(action.writes) != 1 or len(self.producers[action.reads[0]]) != 1:
                continue
            (away,), (value,) = action.reads, action.writes
            (out,) = self.producers[away]
            if (
                self.readers[away] == (back,)
                and (self.actions[out].reads, self.actions[out].writes) == ((value,), (away,))
                and not any(a.effect for a in (action, self.actions[out]))
                and all(self.values[v].role is Role.TRANSIENT for v in (away, value))
                and self.regions[self.values[value].region].on_device
                and not self.regions[self.values[away].region].on_device
            ):
                found.setdefault(value, (out, back))
        return found

    @cached_property
    def repeats(self) -> frozenset[int]:
        """The actions that only make again what others make: each of their writes is a `copy_of` another value."""
        return frozenset(
            i for i, a in enumerate(self.actions) if a.writes and all(self.values[v].copy_of >= 0 for v in a.writes)
        )

    @cached_property
    def originals(self) -> frozenset[int]:
        """The values that others have the content of once more. They are there for their first readers alone: no action
        that reads or writes one runs again.
        """
        return frozenset(value.copy_of for value in self.values if value.copy_of >= 0)

    @cached_property
    def copies(self) -> frozenset[int]:
        """The actions of all round trips, and the repeats that copy between the device and other memory."""
        trips = {action for pair in self.round_trips.values() for action in pair}
        return frozenset(trips | {i for i in self.repeats if self._leaves(self.actions[i])})

    def _leaves(self, action: Action) -> bool:
        """Whether an action reads or writes a value that is off the device."""
        regions = {self.values[v].region for v in (*action.reads, *action.writes)}
        return not all(self.regions[region].on_device for region in regions)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of each value, int64."""
        return np.array([value.nbytes for value in self.values], dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything the planner can see."""
        hasher = hashlib.sha256()
        for line in self._lines():
            hasher.update(line.encode())
            hasher.update(b"\n")
        return hasher.hexdigest()

    def _lines(self) -> Iterator[str]:
        for region in self.regions:
            yield f"region {region.name} {'device' if region.on_device else 'host'}"
        for i, v in enumerate(self.values):
            home = f" home={v.home}" if v.home >= 0 else ""
            named = " kept" * v.kept + (f" copy=v{v.copy_of}" if v.copy_of >= 0 else "")
            what = f"{v.category} {v.role.name.lower()}{home}{named}"
            yield f"v{i} {v.name!r} {v.nbytes} align={v.alignment} r{v.region} {what}"
        for i, a in enumerate(self.actions):
            pairs = [(a.writes[o.write], "!" if o.required else "?", a.reads[o.read]) for o in a.overwrites]
            extra = "".join(f" v{new}{mark}v{old}" for new, mark, old in pairs)
            extra += "".join(f" v{a.writes[p.write]}[{p.offset}]?v{a.reads[p.read]}" for p in a.parts)
            yield (
                f"a{i} {a.name!r} {_ids(a.reads)} -> {_ids(a.writes)}{extra} ws={a.workspace}@r{a.workspace_region} "
                f"flops={a.flops} bytes={a.nbytes} ns={a.nanoseconds}{' effect' if a.effect else ''}"
            )

    def as_text(self) -> str:
        """Regions, values and actions, a line each. `v3?v1`: v3 may take v1's bytes; `v3!v1`: it must; `v3[64]?v1`: v1
        may lie in v3 from its byte 64 on.
        """
        return "\n".join(self._lines()) + "\n"

    def __repr__(self) -> str:
        total = format_bytes(int(self.sizes.sum()))
        return f"<{type(self).__name__}: {len(self.values)} values, {total} in all, {len(self.actions)} actions>"
