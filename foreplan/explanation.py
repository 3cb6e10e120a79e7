"""Why a step needs the memory that it needs, in words, and what would change that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from foreplan.planner import Category, Stages
from foreplan.planner import explain as stages_of
from foreplan.remedies import Rebuild, Remedy, remedies
from foreplan.units import format_bytes
from foreplan.views.memory import Memory, NamedBuffer
from foreplan.views.timeline import Phase, Timeline

if TYPE_CHECKING:
    from foreplan.compiled import Compiled

LARGEST = 5  # things at the peak that are told
_WHEN = {
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.UPDATE: "in an update",
    Phase.RECOMPUTE: "where an activation is computed again",
    Phase.COPY: "where an activation is copied",
}
_KINDS = {
    Category.PARAMETERS: "parameters, kept from step to step",
    Category.OPTIMIZER_STATE: "the optimizer's state, kept from step to step",
    Category.GRADIENTS: "gradients",
    Category.ACTIVATIONS: "activations",
    Category.WORKSPACE: "scratch memory of the kernel that runs",
    Category.INPUTS: "inputs",
    Category.OUTPUTS: "outputs",
}


@dataclass(frozen=True)
class Held:
    """A thing that is alive at the peak.

    Attributes:
        buffer: its bytes.
        since: how it came there, for people.
        waits: what it waits for, for people.
    """

    buffer: NamedBuffer
    since: str
    waits: str


@dataclass(frozen=True)
class Explanation:
    """Why a step needs the memory that it needs.

    Attributes:
        memory: of the step; of one in two halves, that of the half that needs more.
        timeline: what its instructions are.
        held: the largest things alive at the peak.
        stages: what the planner has done already.
        remedies: what else could be done, and what it brings.
    """

    memory: Memory
    timeline: Timeline
    held: tuple[Held, ...]
    stages: Stages
    remedies: tuple[Remedy, ...]

    @staticmethod
    def of(step: Compiled, rebuild: Rebuild | None = None) -> Explanation:
        """That of a step. Every figure is computed: it takes some times as long as compiling.

        Args:
            step: from `compile` or `load_plan`.
            rebuild: the model for a batch; None: nothing is said of other batches.
        """
        program, plan = step.highest
        memory, timeline = step.memory, Timeline.of(program, plan)
        held = tuple(_held(buffer, memory, timeline) for buffer in memory.largest(LARGEST))
        return Explanation(memory, timeline, held, stages_of(program, plan), remedies(step, rebuild))

    @property
    def words(self) -> tuple[str, ...]:
        """Where the peak is and what makes it, in sentences."""
        return tuple(_words(self))

    def to_json(self) -> dict[str, Any]:
        """The same for programs; sizes in bytes."""
        peak = self.memory.peak_step
        held = [
            {"name": each.buffer.name, "nbytes": each.buffer.nbytes, "category": str(each.buffer.category)}
            | {"shape": each.buffer.shape, "since": each.since, "waits": each.waits}
            for each in self.held
        ]
        return {
            "words": list(self.words),
            "arena_bytes": self.memory.arena,
            "peak_step": peak,
            "peak_action": self.memory.action_at(peak),
            "peak_phase": str(self.timeline.phases[peak]) if self.timeline.phases else None,
            "held": held,
            **asdict(self.stages),
            "remedies": [asdict(each) for each in self.remedies],
        }

    def __str__(self) -> str:
        parts = ["\n".join(self.words)]
        if self.held:
            parts.append("\n".join(["The largest things there:", "", *_held_lines(self.held)]))
        parts.append("\n".join(["What the planner has done:", "", *_stage_lines(self)]))
        if self.remedies:
            lines = ["What would change it (each line is computed, none adds to another):", ""]
            parts.append("\n".join([*lines, *_remedy_lines(self)]))
        return "\n\n".join(parts) + "\n"


def _held(buffer: NamedBuffer, memory: Memory, timeline: Timeline) -> Held:
    peak = memory.peak_step

    def at(step: int) -> str:
        return f"{timeline.names[step]} ({timeline.phases[step]}, instruction {step})"

    if buffer.value < 0:
        return Held(buffer, "scratch memory of the instruction", "nothing: it goes with the instruction")
    is_stored = buffer.lower == 0 and buffer.upper >= len(timeline.names) and buffer.written != 0
    if is_stored and buffer.category not in (Category.INPUTS, Category.OUTPUTS):
        changed = f"changed by {at(buffer.written)}" if buffer.written >= 0 else "nothing changes it"
        return Held(buffer, "kept from step to step", changed)
    since = f"made by {at(buffer.written)}" if buffer.written >= 0 else "given when the step begins"
    later = [step for step in buffer.readers if step > peak]
    if peak in buffer.readers:
        more = f", and {len(later)} more" if later else ", last"
        return Held(buffer, since, f"read by this instruction{more}")
    if not later:
        return Held(buffer, since, "returned" if buffer.category is Category.OUTPUTS else "written here")
    more = f", and {len(later) - 1} more after it" if len(later) > 1 else ""
    return Held(buffer, since, f"next read by {at(later[0])}{more}")


def _words(told: Explanation) -> Iterator[str]:
    memory, timeline, peak = told.memory, told.timeline, told.memory.peak_step
    if not timeline.names:
        yield "The plan has no instructions."
        return
    count, when = len(timeline.names), _WHEN[timeline.phases[peak]]
    alive = sum(memory.categories.values())
    yield (
        f"{memory.action_at(peak)} is where most bytes live, {when}, instruction {peak} of {count}: "
        f"{format_bytes(alive)} in an arena of {format_bytes(memory.arena)}."
    )
    shares = sorted(((nbytes, kind) for kind, nbytes in memory.categories.items() if nbytes * 20 > alive), reverse=True)
    if shares:
        listed = [f"{nbytes / alive:.0%} are {_KINDS[kind]}" for nbytes, kind in shares]
        yield f"{', '.join(listed[:-1]) + ' and ' if listed[1:] else ''}{listed[-1]}."
    waiting = [b for b in memory.at(peak) if b.category is Category.ACTIVATIONS and _waits(b, timeline, peak)]
    if waiting:
        nbytes = sum(b.nbytes for b in waiting)
        yield (
            f"{len(waiting):,} activations, {format_bytes(nbytes)}, were made in the forward pass and wait there for "
            "the backward pass, which still has to read them."
        )
    over = memory.arena - memory.lower_bound
    yield (
        "The placement wastes nothing: the arena is as high as what lives at the peak."
        if over <= 0
        else f"The placement adds {format_bytes(over)} to that, {over / memory.lower_bound:.2%}."
    )


def _waits(buffer: NamedBuffer, timeline: Timeline, peak: int) -> bool:
    """Whether a value of the forward pass lives on at the peak for the backward pass alone."""
    made = buffer.written < 0 or timeline.phases[buffer.written] is Phase.FORWARD
    later = [step for step in buffer.readers if step >= peak]
    return made and bool(later) and all(timeline.phases[step] is not Phase.FORWARD for step in later)


def _held_lines(held: tuple[Held, ...]) -> Iterator[str]:
    for each in held:
        shape = f" {each.buffer.shape}" if each.buffer.shape else ""
        yield f"  {format_bytes(each.buffer.nbytes):>12}  {each.buffer.name}{shape}"
        yield f"{'':16}{each.since}"
        yield f"{'':16}{each.waits}"


def _stage_lines(told: Explanation) -> Iterator[str]:
    """A line a stage: bytes that live at its peak, the arena, what it changed, how."""
    yield f"  {'after':<14}{'live':>12}{'arena':>12}{'change':>9}"
    before = 0
    for stage in told.stages.stages:
        change = f"{stage.arena_bytes / before - 1:+.1%}" if before else ""
        sizes = f"{format_bytes(stage.live_bytes):>12}{format_bytes(stage.arena_bytes):>12}"
        yield f"  {stage.name:<14}{sizes}{change:>9}  {stage.detail}"
        before = stage.arena_bytes
    if told.stages.each_once_bytes:
        yield f"  No order without recomputation needs less than {format_bytes(told.stages.each_once_bytes)}."
    if (bound := told.memory.order_lower_bound) is not None:
        yield f"  No schedule at all needs less than {format_bytes(bound)}."


def _remedy_lines(told: Explanation) -> Iterator[str]:
    rows = [("", "arena", "change", "time a sample", "")]
    for each in told.remedies:
        if each.arena_bytes is None:
            rows.append((each.name, "cannot be", "", "", each.note))
            continue
        change = f"{each.arena_bytes / told.memory.arena - 1:+.1%}" if told.memory.arena else ""
        time = "" if each.seconds_ratio is None else f"{each.seconds_ratio:+.1%}"
        rows.append((each.name, format_bytes(each.arena_bytes), change, time, each.how))
    width = max(len(row[0]) for row in rows)
    for name, arena, change, time, how in rows:
        yield f"  {name:<{width}}{arena:>13}{change:>9}{time:>15}  {how}".rstrip()
