"""A plan as a graph of data: which instruction reads which content, and where that lies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foreplan.planner.report import buffers
from foreplan.report.memory import Memory, printable, types_of
from foreplan.report.timeline import Timeline

if TYPE_CHECKING:
    from foreplan.graph import TensorType


@dataclass(frozen=True)
class Content:
    """What one instruction writes, or what is there when the step begins: one life of a value.

    Attributes:
        name: of the value; a further life has `#2`, `#3` and so on behind it.
        value: index into the problem's values.
        written: the instruction that writes it; -1 if it is there when the step begins.
        offset: within its region.
        lower, upper: the instructions during which its bytes are reserved, half-open; empty where another value takes
            them at once.
        last: whether it is what the step ends with.
        type: as kernels see it; None where the problem says bytes alone.
    """

    name: str
    value: int
    written: int
    offset: int
    lower: int
    upper: int
    last: bool
    type: TensorType | None


@dataclass(frozen=True)
class Flow:
    """The instructions of a plan, with the contents that they read and write.

    Attributes:
        contents: in the order in which they are written.
        reads: for each instruction, indices into `contents`, in the action's order.
        writes: likewise.
    """

    memory: Memory
    line: Timeline
    contents: tuple[Content, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(memory: Memory) -> Flow:
        """The flow of a verified plan."""
        problem, plan = memory.problem, memory.plan
        lives = {(b.value, b.offset, b.written): (b.lower, b.upper) for b in buffers(plan, problem) if b.value >= 0}
        types, ends = types_of(problem), dict(plan.ends)
        found: list[Content] = []
        current: dict[tuple[int, int], int] = {}
        times = [0] * len(problem.values)

        def add(value: int, offset: int, written: int) -> int:
            times[value] += 1
            name = printable(problem.values[value].name) + (f"#{times[value]}" if times[value] > 1 else "")
            life = lives.get((value, offset, written), (max(0, written), max(0, written)))
            found.append(Content(name, value, written, offset, *life, False, types.get(value)))
            current[value, offset] = len(found) - 1
            return len(found) - 1

        for value, offset in plan.starts:
            add(value, offset, -1)
        reads, writes = [], []
        for i, step in enumerate(plan.steps):
            action = problem.actions[step.action]
            reads.append(tuple(current[place] for place in zip(action.reads, step.reads)))
            writes.append(tuple(add(value, offset, i) for value, offset in zip(action.writes, step.writes)))
        last = {current[place] for place in ends.items()}
        contents = tuple(replace(each, last=True) if i in last else each for i, each in enumerate(found))
        return Flow(memory, Timeline.of(problem, plan), contents, tuple(reads), tuple(writes))

    def facts(self, content: Content) -> dict[str, str | int]:
        """Where a content lies and when, for people and programs; sizes in bytes."""
        value = self.memory.problem.values[content.value]
        return {
            "offset": content.offset,
            "bytes": value.nbytes,
            "region": self.memory.problem.regions[value.region].name,
            "category": str(value.category),
            "lower": content.lower,
            "upper": content.upper,
            "written": content.written,
            "type": "" if content.type is None else str(content.type),
        }

    def sentence(self, content: Content) -> str:
        """Where a content lies and when: `arena, bytes 512 to 1,023; alive from instruction 3 to 7`."""
        facts = self.facts(content)
        first, nbytes = content.offset, int(facts["bytes"])
        until = max(content.lower, content.upper - 1)
        return (
            f"{facts['region']}, bytes {first:,} to {first + max(0, nbytes - 1):,}; "
            f"alive from instruction {content.lower} to {until}"
        )

    def facts_of(self, step: int) -> dict[str, str | int]:
        """What an instruction is; sizes in bytes, times in nanoseconds."""
        run = self.memory.plan.steps[step]
        action = self.memory.problem.actions[run.action]
        scratch = {"workspace": action.workspace, "workspace_at": run.workspace} if action.workspace else {}
        return {
            "instruction": step,
            "phase": str(self.line.phases[step]),
            "begin_ns": int(self.line.edges[step]),
            "predicted_ns": action.nanoseconds,
            "flops": action.flops,
            **scratch,
        }
