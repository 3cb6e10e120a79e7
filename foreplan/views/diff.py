"""What changed from one plan to another: sizes, categories, and the buffers alive at the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from foreplan.base.units import format_bytes, format_count
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Category, Problem
from foreplan.report.memory import Memory, peak_text

_MOST = 15  # buffers that are listed of a kind


@dataclass(frozen=True)
class Change:
    """One number before and after; None where there is none."""

    name: str
    before: int | None
    after: int | None

    @property
    def delta(self) -> int:
        """The difference, after minus before; a missing number counts as 0."""
        return (self.after or 0) - (self.before or 0)


@dataclass(frozen=True)
class Difference:
    """What changed between two plans, all in bytes but `flops` and `instructions`.

    Attributes:
        before: memory of the first plan.
        after: memory of the second.
        sizes: arena, bounds, persistent, workspace; host memory where either has any.
        counts: instructions, recomputed actions, flops; copies to host memory and back where either may have any.
        categories: bytes of each category alive at the respective peak, where either has any.
        buffers: by name, those that are alive at only one of the two peaks, or differ in size; largest change first.
    """

    before: Memory
    after: Memory
    sizes: tuple[Change, ...]
    counts: tuple[Change, ...]
    categories: tuple[Change, ...]
    buffers: tuple[Change, ...]

    def as_json(self) -> dict[str, Any]:
        """Every number before and after; exact integers."""

        def columns(changes: tuple[Change, ...]) -> dict[str, Any]:
            return {c.name: {"before": c.before, "after": c.after, "delta": c.delta} for c in changes}

        return {
            "bytes": columns(self.sizes),
            "counts": columns(self.counts),
            "categories": columns(self.categories),
            "peak": {
                "before": {"step": self.before.peak_step, "action": self.before.action_at(self.before.peak_step)},
                "after": {"step": self.after.peak_step, "action": self.after.action_at(self.after.peak_step)},
            },
            "buffers": columns(self.buffers),
        }

    def __str__(self) -> str:
        return _as_text(self)


def diff(problem_a: Problem, plan_a: Plan, problem_b: Problem, plan_b: Plan) -> Difference:
    """Compare two plans, of one problem or of two; buffers are matched by name."""
    a, b = Memory(problem_a, plan_a), Memory(problem_b, plan_b)
    sizes = [
        Change("arena_bytes", a.arena, b.arena),
        Change("lower_bound_bytes", a.lower_bound, b.lower_bound),
        Change("order_lower_bound_bytes", a.order_lower_bound, b.order_lower_bound),
        Change("persistent_bytes", a.persistent, b.persistent),
        Change("workspace_bytes", a.workspace, b.workspace),
    ]
    if a.host or b.host:
        sizes.append(Change("host_bytes", a.host, b.host))
    counts = [
        Change("instructions", len(plan_a.steps), len(plan_b.steps)),
        Change("recomputed", _recomputed(problem_a, plan_a), _recomputed(problem_b, plan_b)),
        Change("flops", _flops(problem_a, plan_a), _flops(problem_b, plan_b)),
    ]
    if problem_a.copies or problem_b.copies:
        counts.append(Change("copied", _copied(problem_a, plan_a), _copied(problem_b, plan_b)))
    categories = [Change(str(c), a.categories[c], b.categories[c]) for c in Category]
    return Difference(
        before=a,
        after=b,
        sizes=tuple(sizes),
        counts=tuple(counts),
        categories=tuple(c for c in categories if c.before or c.after),
        buffers=_buffers(a, b),
    )


def _recomputed(problem: Problem, plan: Plan) -> int:
    runs = [step.action for step in plan.steps if step.action not in problem.copies]
    return len(runs) - len(set(runs))


def _copied(problem: Problem, plan: Plan) -> int:
    return sum(step.action in problem.copies for step in plan.steps)


def _flops(problem: Problem, plan: Plan) -> int:
    return sum(problem.actions[step.action].flops for step in plan.steps)


def _buffers(a: Memory, b: Memory) -> tuple[Change, ...]:
    alive = []
    for memory in (a, b):
        # Two buffers of one name are parts of one thing, such as a value that lies in two regions at once.
        by_name: Counter[str] = Counter()
        for buffer in memory.at(memory.peak_step):
            by_name[buffer.name] += buffer.nbytes
        alive.append(by_name)
    before, after = alive
    names = dict.fromkeys((*before, *after))
    changes = [Change(name, before.get(name), after.get(name)) for name in names]
    return tuple(sorted((c for c in changes if c.before != c.after), key=lambda c: (-abs(c.delta), c.name)))


def _signed(delta: int) -> str:
    return "same" if delta == 0 else ("+" if delta > 0 else "-") + format_bytes(abs(delta))


def _optional(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _rows(changes: tuple[Change, ...]) -> list[str]:
    width = max((len(c.name) for c in changes), default=0)
    return [
        f"  {c.name.replace('_', ' '):<{width}}  {_optional(c.before):>12} -> {_optional(c.after):>12}  "
        f"{_signed(c.delta):>13}"
        for c in changes
    ]


def _as_text(d: Difference) -> str:
    lines = ["memory", *_rows(tuple(Change(c.name.removesuffix("_bytes"), c.before, c.after) for c in d.sizes)), ""]
    for c in d.counts:
        before, after = (format_count(n or 0) if c.name == "flops" else f"{n:,}" for n in (c.before, c.after))
        lines.append(f"  {c.name:<12} {before} -> {after}")
    lines += ["", f"before: {peak_text(d.before)}", f"after:  {peak_text(d.after)}", "", *_rows(d.categories)]
    groups = (
        ("only before, at its peak", [c for c in d.buffers if c.after is None]),
        ("only after, at its peak", [c for c in d.buffers if c.before is None]),
        ("of another size", [c for c in d.buffers if c.before is not None and c.after is not None]),
    )
    for title, changes in groups:
        if not changes:
            continue
        lines += ["", f"{title}: {len(changes)} buffers, {_signed(sum(c.delta for c in changes))}"]
        lines += [f"  {_signed(c.delta):>13}  {c.name}" for c in changes[:_MOST]]
        if len(changes) > _MOST:
            lines.append(f"  {'...':>13}  and {len(changes) - _MOST} more")
    if not d.buffers:
        lines += ["", "the same buffers are alive at both peaks"]
    return "\n".join(lines) + "\n"
