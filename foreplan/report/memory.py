"""The memory of a plan: the peak, its bounds, and the buffers that are alive at each instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.units import format_bytes
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Category, Problem, Role
from foreplan.planner.report import buffers, category_series

if TYPE_CHECKING:
    from foreplan.base.outside import Part
    from foreplan.graph import TensorType
    from foreplan.lower.outside import Use


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """Bytes that are reserved for a stretch of instructions, with names for people.

    Attributes:
        name: of the value, or of the action whose workspace it is.
        nbytes: size.
        category: the name of their kind, for people.
        producer: the action that writes it; for a stored value its update; empty if no action writes it.
        lower: the first instruction during which the bytes are reserved.
        upper: the one after the last (half-open).
        region: name of its region.
        offset: of its first byte within the region.
        shape: such as `float32[32,64]` where a kernel sees it whole; empty otherwise.
        on_device: whether its region counts toward the arena.
        value: index of its value in the problem; -1 for a workspace.
        written: the instruction that writes it; -1 if none does.
        readers: the instructions that read it, in order.
    """

    name: str
    nbytes: int
    category: Category
    producer: str
    lower: int
    upper: int
    region: str
    offset: int
    shape: str = ""
    on_device: bool = True
    value: int = -1
    written: int = -1
    readers: tuple[int, ...] = ()


def types_of(problem: Problem) -> dict[int, TensorType]:
    """The type of each value that a call of a program reads or writes whole; empty for a bare problem."""
    from foreplan.lower.program import Program

    types: dict[int, TensorType] = {}
    if not isinstance(problem, Program):
        return types
    slots = [slot.operand for slot in (*problem.inputs, *problem.stored, *problem.outputs, *problem.gradients)]
    # Outputs before inputs: a reader may see a value through a reshape, its writer sees it as it was made.
    written = [operand for call in problem.calls for operand in call.outputs]
    read = [operand for call in problem.calls for operand in call.inputs]
    for operand in (*slots, *written, *read):
        if operand.offset == 0 and operand.nbytes == problem.values[operand.value].nbytes:
            types.setdefault(operand.value, operand.type)
    return types


def named_buffers(problem: Problem, plan: Plan) -> tuple[NamedBuffer, ...]:
    """Every buffer of a plan with its names, in the planner's own order.

    A stored value and its content for the next step lie in the same bytes: they are one buffer, under the stored
    value's name, written by its update. That holds too where the first instruction is the update, so that the old
    content is reserved during no instruction.
    """
    types = types_of(problem)
    actions = [problem.actions[step.action] for step in plan.steps]
    whole = buffers(plan, problem)
    ends = {value for value, _ in plan.ends}
    updates = {home: b for b in whole if b.value in ends and (home := problem.values[b.value].home) >= 0}
    before = {b.value for b in whole if b.value in updates}
    found = []
    for b in whole:
        region = problem.regions[b.region]
        if b.value < 0:
            name = actions[b.lower].name
            place = (name, b.lower, b.upper, region.name, b.offset, "", region.on_device, -1, b.lower)
            found.append(NamedBuffer(f"{name} (workspace)", b.nbytes, Category.WORKSPACE, *place))
            continue
        value = problem.values[b.value]
        if value.home in updates and updates[value.home] is b:
            if value.home in before:
                continue
            readers = (b.written,) if value.home in actions[b.written].reads else ()
            b, value = replace(b, value=value.home, readers=readers + b.readers), problem.values[value.home]
        elif (new := updates.get(b.value)) is not None:  # its bytes are its own throughout
            b = replace(b, upper=max(1, len(actions)), written=new.written, readers=b.readers + new.readers)
        found.append(
            NamedBuffer(
                value.name,
                b.nbytes,
                value.category,
                actions[b.written].name if b.written >= 0 else "",
                b.lower,
                b.upper,
                region.name,
                b.offset,
                str(types.get(b.value, "")),
                region.on_device,
                b.value,
                b.written,
                b.readers,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Memory:
    """The memory of a planned step, in bytes.

    Attributes:
        problem: what was planned; a `Program` gives shapes as well.
        plan: its plan.
        outside: what lies outside the arena: on the card or, for a target on the host, in the whole process. Empty for
            a bare problem.
        part: which part of a step this is, for people; empty for a whole one.
    """

    problem: Problem
    plan: Plan
    outside: tuple[Part, ...] = ()
    part: str = ""

    @classmethod
    def of(cls, problem: Problem, plan: Plan, part: str = "", use: Use | None = None) -> Memory:
        """The memory of a plan, with what its target needs outside the arena; that depends on what else the process
        does."""
        from foreplan.lower.outside import outside
        from foreplan.lower.program import Program

        return cls(problem, plan, outside(problem, plan, use) if isinstance(problem, Program) else (), part)

    def __repr__(self) -> str:
        outside = self.peak - self.arena
        return f"<Memory: {format_bytes(self.arena)} of arena and {format_bytes(outside)} outside it>"

    @property
    def peak(self) -> int:
        """Bytes the step takes: the arena and what lies outside it, of the card or of the whole process on the host."""
        return self.plan.arena_bytes + sum(part.nbytes for part in self.outside)

    @property
    def arena(self) -> int:
        """Height of the packed arena, persistent values included."""
        return self.plan.arena_bytes

    @property
    def lower_bound(self) -> int:
        """The highest live set of this schedule."""
        return self.plan.lower_bound_bytes

    @property
    def order_lower_bound(self) -> int | None:
        """A proven bound over all schedules that the problem allows; None if none was proved."""
        return self.plan.order_lower_bound_bytes

    @property
    def peak_step(self) -> int:
        """The instruction at which most bytes are alive."""
        return self.plan.certificate.peak_step

    @property
    def persistent(self) -> int:
        """Bytes that belong to stored values throughout: parameters, statistics, optimizer state, constants."""
        return sum(value.nbytes for value in self.problem.values if value.role is Role.STORED)

    @property
    def host(self) -> int:
        """Host memory for what is copied off the device."""
        heights = zip(self.plan.heights, self.problem.regions)
        return sum(height for height, region in heights if not region.on_device)

    @cached_property
    def workspace(self) -> int:
        """The largest scratch memory of any instruction."""
        return max((self.problem.actions[step.action].workspace for step in self.plan.steps), default=0)

    @cached_property
    def buffers(self) -> tuple[NamedBuffer, ...]:
        """Every buffer of the plan."""
        return named_buffers(self.problem, self.plan)

    @cached_property
    def things(self) -> dict[int, int]:
        """Of values that are others once more, computed again or copied to host memory: the others."""
        trips = self.problem.round_trips.items()
        again = {v: value.copy_of for v, value in enumerate(self.problem.values) if value.copy_of >= 0}
        return again | {self.problem.actions[out].writes[0]: value for value, (out, _) in trips}

    @cached_property
    def series(self) -> dict[Category, np.ndarray]:
        """Bytes of each category during each instruction, on the device: int64[instructions], every category is there.

        Each buffer counts with its size rounded up to the alignment of its region.
        """
        return category_series(self.plan, self.problem)

    @cached_property
    def categories(self) -> dict[Category, int]:
        """Bytes of each category that the plan holds at the peak; together the lower bound, or above it where the plan
        has a write beside a read whose bytes it might take.
        """
        return {category: int(nbytes[self.peak_step]) for category, nbytes in self.series.items()}

    @cached_property
    def live(self) -> np.ndarray:
        """Bytes alive on the device during each instruction, int64[instructions]."""
        return np.sum(list(self.series.values()), axis=0)

    def at(self, step: int) -> tuple[NamedBuffer, ...]:
        """The buffers alive during an instruction, largest first.

        Raises:
            IndexError: the plan has no such instruction.
        """
        count = len(self.plan.steps)
        if count and not -count <= step < count:
            raise IndexError(f"there is no instruction {step}; the plan has {count}")
        step = step % count if count else 0
        alive = [b for b in self.buffers if b.lower <= step < b.upper]
        return tuple(sorted(alive, key=lambda b: (-b.nbytes, b.lower, b.name)))

    def largest(self, k: int = 5) -> tuple[NamedBuffer, ...]:
        """The `k` largest buffers alive at the peak."""
        return tuple(b for b in self.at(self.peak_step) if b.on_device)[:k]

    @cached_property
    def workspaces(self) -> tuple[tuple[str, str, int], ...]:
        """For each instruction that needs scratch memory: its action, its kernel and the bytes; the largest first."""
        calls = getattr(self.problem, "calls", ())
        used = dict.fromkeys(step.action for step in self.plan.steps)
        found = [
            (self.problem.actions[i].name, calls[i].kernel if calls else "", self.problem.actions[i].workspace)
            for i in used
            if self.problem.actions[i].workspace
        ]
        return tuple(sorted(found, key=lambda each: -each[2]))

    def action_at(self, step: int) -> str:
        """Name of the action that an instruction runs; empty where the plan has none."""
        steps = self.plan.steps
        return self.problem.actions[steps[step].action].name if steps else ""

    def as_json(self) -> dict[str, Any]:
        """The same numbers for programs: exact integers, names as in the plan."""
        return {
            "peak_bytes": self.peak,
            "arena_bytes": self.arena,
            "host_bytes": self.host,
            "lower_bound_bytes": self.lower_bound,
            "order_lower_bound_bytes": self.order_lower_bound,
            "persistent_bytes": self.persistent,
            "workspace_bytes": self.workspace,
            "budget_bytes": self.plan.budget,
            "peak_step": self.peak_step,
            "peak_action": self.action_at(self.peak_step),
            "instructions": len(self.plan.steps),
            "categories": {str(category): nbytes for category, nbytes in self.categories.items()},
            "largest": [asdict(buffer) | {"category": str(buffer.category)} for buffer in self.largest(10)],
            "outside": [asdict(part) for part in self.outside],
            "workspaces": [
                {"action": name, "kernel": kernel, "bytes": nbytes} for name, kernel, nbytes in self.workspaces
            ],
        }

    def __str__(self) -> str:
        return as_table(self)


def as_table(memory: Memory, largest: int = 10) -> str:
    """The memory of a step as people read it; ends in a newline."""
    gap = memory.arena - memory.lower_bound
    share = f", {gap / memory.lower_bound:.2%} above it" if gap and memory.lower_bound else ""
    rows = [
        ("arena", memory.arena, "everything the step keeps or makes"),
        ("lower bound", memory.lower_bound, f"of this schedule: {_gap_text(gap)}{share}"),
    ]
    if memory.outside:
        more, whole = format_bytes(memory.peak - memory.arena), "card" if on_card(memory) else "process"
        rows.insert(0, ("peak", memory.peak, f"of the whole {whole}: the arena and {more} outside it"))
    if memory.order_lower_bound is not None:
        rows.append(("in any order", memory.order_lower_bound, "no schedule of these actions needs less"))
    if memory.plan.budget is not None:
        rows.append(("budget", memory.plan.budget, "asked for"))
    rows.append(("persistent", memory.persistent, "kept from step to step"))
    rows.append(("workspace", memory.workspace, "the most that one instruction uses"))
    if memory.host:
        rows.append(("host", memory.host, "host memory, for what is copied there and back"))
    lines = [memory.part, ""] if memory.part else []
    lines += [f"{name:<13} {format_bytes(nbytes):>12}  {nbytes:>16,} bytes   {note}" for name, nbytes, note in rows]
    lines += ["", peak_text(memory), ""]
    total = max(1, sum(memory.categories.values()))
    lines += [
        f"  {category.replace('_', ' '):<16} {format_bytes(nbytes):>12}  {nbytes / total:>6.1%}"
        for category, nbytes in memory.categories.items()
        if nbytes
    ]
    if shown := memory.largest(largest):
        lines += ["", "the largest buffers alive there:", "", buffer_table(shown)]
    if on_card(memory) and memory.workspaces:
        total = sum(nbytes for _, _, nbytes in memory.workspaces)
        lines += ["", f"the largest workspaces, of {format_bytes(total)} over all instructions:", ""]
        lines += [
            f"  {format_bytes(nbytes):>12}  {_short(name, 48):<48}  {kernel}"
            for name, kernel, nbytes in memory.workspaces[:largest]
        ]
    if memory.outside:
        lines += ["", "outside the arena:", ""]
        lines += [
            f"  {part.name:<30} {format_bytes(part.nbytes):>12}  {part.basis}: {part.source}" for part in memory.outside
        ]
    return "\n".join(lines) + "\n"


def on_card(memory: Memory) -> bool:
    """Whether the arena lies on a card."""
    from foreplan.lower.targets import engine_info

    return engine_info(getattr(memory.problem, "target", "")).on_card


def _gap_text(gap: int) -> str:
    return "reached, no placement is lower" if gap == 0 else f"the arena is {format_bytes(gap)}"


def peak_text(memory: Memory) -> str:
    """Where the peak is: `peak at instruction 7 of 20, conv1 (data gradient): 1.00 GiB alive`."""
    count = len(memory.plan.steps)
    if not count:
        return "the plan has no instructions"
    alive = format_bytes(sum(memory.categories.values()))
    return f"peak at instruction {memory.peak_step} of {count}, {memory.action_at(memory.peak_step)}: {alive} alive"


def buffer_table(shown: Sequence[NamedBuffer]) -> str:
    """Buffers as aligned columns: bytes, name, shape, category, lifetime."""
    rows = [("bytes", "buffer", "shape", "category", "lifetime")]
    rows += [
        (
            format_bytes(b.nbytes),
            _short(b.name, 48),
            _short(b.shape, 28),
            b.category.replace("_", " "),
            f"[{b.lower}, {b.upper})",
        )
        for b in shown
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for row in rows:
        cells = [row[0].rjust(widths[0]), *(cell.ljust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def printable(text: str) -> str:
    """`text` with line breaks, controls and what no encoding has written out, as Python writes them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _short(text: str, width: int) -> str:
    """`text`, with its middle left out where it is longer than `width`; line breaks and controls made visible."""
    text = printable(text)
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def does_not_fit(memory: Memory, needed: int, capacity: int, advice: Sequence[str] = ()) -> str:
    """Why a step does not fit, for people: needed, capacity, bounds, the peak and its five largest buffers.

    Args:
        memory: of the smallest plan found.
        needed: bytes that it needs: its arena, and what lies outside it where the budget holds for both.
        capacity: bytes that were allowed.
        advice: what to try next, a line each.
    """
    beside = f": the arena, and {format_bytes(needed - memory.arena)} outside it" if needed > memory.arena else ""
    lines = [
        f"does not fit: {format_bytes(needed - capacity)} too much",
        f"  needed       {format_bytes(needed):>12}  ({needed:,} bytes{beside})",
        f"  capacity     {format_bytes(capacity):>12}  ({capacity:,} bytes)",
        f"  lower bound  {format_bytes(memory.lower_bound):>12}  (of this schedule)",
    ]
    if memory.order_lower_bound is not None:
        lines.append(f"  in any order {format_bytes(memory.order_lower_bound):>12}  (no schedule needs less)")
    lines.append(f"  {peak_text(memory)}")
    if shown := memory.largest(5):
        lines += ["  its largest buffers:", buffer_table(shown)]
    if advice:
        lines += ["try next:", *(f"  - {line}" for line in advice)]
    return "\n".join(lines)
