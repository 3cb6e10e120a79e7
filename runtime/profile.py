"""Where the time of a step goes: by kernel and by module, beside what was predicted and what the machine can do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foreplan.base.patterns import scopes_of
from foreplan.base.units import format_seconds
from foreplan.runtime.check import Timing
from foreplan.runtime.engine import Peak

LEAST = 0.005  # of the time: kernels and modules below this share are one row
DEEPEST = 3  # levels of modules that are listed


@dataclass(frozen=True)
class Group:
    """Instructions of one kind.

    Attributes:
        name: of the kernel, or of the module.
        count: instructions.
        seconds, predicted_seconds: of one step.
        flops, nbytes: operations, and bytes read and written, each once.
        peak_ratio: the time in which the machine at its best does as many operations and moves as many bytes, over the
            time measured; None: nothing was measured. Products of narrow types, and data in caches, may exceed 1.
    """

    name: str
    count: int
    seconds: float
    predicted_seconds: float
    flops: int
    nbytes: int
    peak_ratio: float | None

    @staticmethod
    def of(name: str, timings: Sequence[Timing], peak: Peak) -> Group:
        """The sums of some instructions."""
        seconds = sum(each.seconds for each in timings)
        bound = sum(max(each.flops / peak.flops_per_second, each.nbytes / peak.bytes_per_second) for each in timings)
        return Group(
            name,
            len(timings),
            seconds,
            sum(each.predicted_seconds for each in timings),
            sum(each.flops for each in timings),
            sum(each.nbytes for each in timings),
            bound / seconds if seconds else None,
        )


@dataclass(frozen=True)
class Profile:
    """A measured step.

    Attributes:
        target: that it ran on.
        step_seconds: the shortest step, as it runs.
        instructions: in the order in which they run, each with its shortest time: watched one by one they take somewhat
            longer than in the step.
        peak: what the machine does at best.
        notes: of the program, among them kernels of NumPy that stand in for others.
    """

    target: str
    step_seconds: float
    instructions: tuple[Timing, ...]
    peak: Peak
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of all instructions together."""
        return sum(each.seconds for each in self.instructions)

    @property
    def predicted_seconds(self) -> float:
        """Of all instructions together, as the planner counted."""
        return sum(each.predicted_seconds for each in self.instructions)

    def by_kernel(self) -> list[Group]:
        """One group for each op and kernel, the one of the most time first."""
        return sorted(self._grouped(lambda each: [_kernel(each)]), key=lambda group: -group.seconds)

    def by_module(self) -> list[Group]:
        """One group for each scope of the model, as it is listed: a module contains its parts, and their gradients."""
        return self._grouped(lambda each: scopes_of(each.node))

    def _grouped(self, names: Callable[[Timing], Iterable[str]]) -> list[Group]:
        groups: defaultdict[str, list[Timing]] = defaultdict(list)
        for each in self.instructions:
            for name in names(each):
                groups[name].append(each)
        return [Group.of(name, timings, self.peak) for name, timings in groups.items()]

    def to_json(self) -> dict[str, Any]:
        """All of it, in seconds, bytes and floating-point operations."""
        return {
            "target": self.target,
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "predicted_seconds": self.predicted_seconds,
            "peak": vars(self.peak),
            "kernels": [vars(group) for group in self.by_kernel()],
            "modules": [vars(group) for group in self.by_module()],
            "instructions": [vars(each) for each in self.instructions],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """Tables for people."""
        rate = f"{self.peak.flops_per_second / 1e9:,.0f} GFLOP/s in float32 and {self.peak.bytes_per_second / 1e9:,.1f}"
        kernels = [group for group in self.by_kernel() if group.seconds >= LEAST * self.seconds]
        rest = self._rest(kernels)
        return "\n".join(
            [
                f"a step takes {format_seconds(self.step_seconds)}; one by one, its {len(self.instructions):,} "
                f"instructions take {format_seconds(self.seconds)}; predicted were "
                f"{format_seconds(self.predicted_seconds)}",
                f"the machine at its best: {rate} GB/s ({self.peak.source})",
                "",
                *self._table("kernel", [*kernels, *rest]),
                "",
                *self._table("module", self._modules()),
            ]
        )

    def _rest(self, listed: Iterable[Group]) -> list[Group]:
        names = {group.name for group in listed}
        others = [each for each in self.instructions if _kernel(each) not in names]
        return [Group.of("others", others, self.peak)] if others else []

    def _modules(self) -> list[Group]:
        """The modules to list: the upper ones, without those that are all of the one that contains them."""
        groups = {group.name: group for group in self.by_module()}
        found = []
        for name, group in groups.items():
            above = list(scopes_of(name))[:-1]
            whole = above and groups[above[-1]].count == group.count
            if len(above) < DEEPEST and not whole and group.seconds >= LEAST * self.seconds:
                found.append(group)
        return found

    def _table(self, kind: str, groups: Sequence[Group]) -> list[str]:
        columns: list[tuple[str, Callable[[Group], str]]] = [
            (kind, lambda group: group.name),
            ("runs", lambda group: f"{group.count:,}"),
            ("time", lambda group: format_seconds(group.seconds)),
            ("share", lambda group: f"{group.seconds / self.seconds:.1%}" if self.seconds else ""),
            ("predicted", lambda group: format_seconds(group.predicted_seconds)),
            ("GFLOP/s", lambda group: f"{group.flops / group.seconds / 1e9:,.0f}" if group.seconds else ""),
            ("GB/s", lambda group: f"{group.nbytes / group.seconds / 1e9:,.1f}" if group.seconds else ""),
            ("of the best", lambda group: "" if group.peak_ratio is None else f"{group.peak_ratio:.0%}"),
        ]
        rows = [[head for head, _ in columns], *([cell(group) for _, cell in columns] for group in groups)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
            for row in rows
        ]


def _kernel(each: Timing) -> str:
    return f"{each.op} {each.kernel}"
