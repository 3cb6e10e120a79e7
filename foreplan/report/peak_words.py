"""What is at the peak of a step, and why, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foreplan.base.units import format_bytes
from foreplan.planner.problem import Category
from foreplan.report.memory import Memory, NamedBuffer
from foreplan.report.timeline import Phase, Timeline

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
    Category.COMMUNICATION: "what arrives from other ranks",
    Category.INPUTS: "inputs",
    Category.OUTPUTS: "outputs",
}


@dataclass(frozen=True)
class PeakBuffer:
    """A thing that is alive at the peak.

    Attributes:
        buffer: its bytes.
        since: how it came there, for people.
        waits: what it waits for, for people.
    """

    buffer: NamedBuffer
    since: str
    waits: str


def largest_at_peak(memory: Memory, timeline: Timeline) -> tuple[PeakBuffer, ...]:
    """The largest things alive at the peak, and what each waits for."""
    return tuple(_held(buffer, memory, timeline) for buffer in memory.largest(LARGEST))


def _held(buffer: NamedBuffer, memory: Memory, timeline: Timeline) -> PeakBuffer:
    peak = memory.peak_step

    def at(step: int) -> str:
        return f"{timeline.names[step]} ({timeline.phases[step]}, instruction {step})"

    if buffer.value < 0:
        return PeakBuffer(buffer, "scratch memory of the instruction", "nothing: it goes with the instruction")
    is_stored = buffer.lower == 0 and buffer.upper >= len(timeline.names) and buffer.written != 0
    if is_stored and buffer.category not in (Category.INPUTS, Category.OUTPUTS):
        changed = f"changed by {at(buffer.written)}" if buffer.written >= 0 else "nothing changes it"
        return PeakBuffer(buffer, "kept from step to step", changed)
    since = f"made by {at(buffer.written)}" if buffer.written >= 0 else "given when the step begins"
    later = [step for step in buffer.readers if step > peak]
    if peak in buffer.readers:
        more = f", and {len(later)} more" if later else ", last"
        return PeakBuffer(buffer, since, f"read by this instruction{more}")
    if not later:
        return PeakBuffer(buffer, since, "returned" if buffer.category is Category.OUTPUTS else "written here")
    more = f", and {len(later) - 1} more after it" if len(later) > 1 else ""
    return PeakBuffer(buffer, since, f"next read by {at(later[0])}{more}")


def peak_words(memory: Memory, timeline: Timeline) -> tuple[str, ...]:
    """Where the peak is and what makes it, a sentence each."""
    return tuple(_words(memory, timeline))


def _words(memory: Memory, timeline: Timeline) -> Iterator[str]:
    peak = memory.peak_step
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
