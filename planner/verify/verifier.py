"""The verifier: replays a plan over abstract memory and proves that every read sees its value.

It is always on. It shares no code with the planner, only the types of problems and plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from typing import NoReturn

from foreplan.base.errors import UsageError, VerificationError
from foreplan.planner.plan import Plan, Step
from foreplan.planner.problem import ALIGNMENT, Action, Problem, Role
from foreplan.planner.verify.replay import Content, Memory
from foreplan.planner.verify.wellformed import check_problem

_Range = tuple[int, int, int]  # address, end, index of the write or -1 for the workspace


def verify(plan: Plan, problem: Problem) -> None:
    """Prove that a plan is right for a problem, in time near-linear in its size.

    That is: it answers this problem; each effect happens exactly once; everything is aligned and lies within its
    region; each read sees its whole value; writes and workspaces touch nothing that the same step reads or writes,
    except for permitted overwrites, and required ones are taken; stored bytes change to their next content only; at the
    end, every needed value is there; and the plan's figures follow from its own offsets and lives.

    Raises:
        VerificationError: names the step, its action, the values and the bytes of the first error.
        PlanError: the problem is not well-formed (`check_problem`).
        UsageError: an argument is not a Plan, or not a Problem.
    """
    check_problem(problem)
    if not isinstance(plan, Plan):
        raise UsageError(f"a Plan is needed, got {type(plan).__name__}")
    _check_form(plan, problem)
    _check_effects(plan, problem)
    replay = _Replay(plan, problem)
    replay.start()
    for number in range(len(plan.steps)):
        replay.run(number)
    replay.finish()
    _check_figures(plan, problem, _live_bytes(plan, problem))


def _check_form(plan: Plan, problem: Problem) -> None:
    if plan.problem_digest != problem.digest:
        raise VerificationError(
            f"the plan answers problem {plan.problem_digest[:12]}, not this one, {problem.digest[:12]}; plan again"
        )
    unit = _unit(problem)
    if len(plan.heights) != len(problem.regions) or any(h < 0 or h % unit for h in plan.heights):
        raise VerificationError(
            f"heights {list(plan.heights)}: a multiple of {unit} is needed for each of {len(problem.regions)} regions"
        )
    for number, step in enumerate(plan.steps):
        if not 0 <= step.action < len(problem.actions):
            raise VerificationError(f"step {number} runs action {step.action}, which is not there")
        action = problem.actions[step.action]
        if len(step.reads) != len(action.reads) or len(step.writes) != len(action.writes):
            raise VerificationError(
                f"step {number} ({action.name!r}) has {len(step.reads)} read and {len(step.writes)} write offsets for "
                f"{len(action.reads)} reads and {len(action.writes)} writes"
            )


def _unit(problem: Problem) -> int:
    """Bytes of which heights and workspaces' offsets are multiples: the largest alignment that anything has."""
    return max([ALIGNMENT, *(value.alignment for value in problem.values)])


def _check_effects(plan: Plan, problem: Problem) -> None:
    runs = Counter(step.action for step in plan.steps)
    for index, action in enumerate(problem.actions):
        if action.effect and runs[index] != 1:
            raise VerificationError(
                f"action {action.name!r} has an effect and must run once; it runs {runs[index]} times"
            )


def _live_bytes(plan: Plan, problem: Problem) -> list[int]:
    """Bytes on the device that any plan of these steps needs at each step, for every placement: values that are read
    there or needed later, writes and workspace, less the bytes that may be shared; from the last step to the first.

    Sizes are rounded up to the smallest alignment in their region. For step 0, the values that are there at the start
    count instead, if they are more.
    """
    values, regions = problem.values, problem.regions
    grain = [ALIGNMENT] * len(regions)
    for v in values:
        grain[v.region] = min(grain[v.region], v.alignment) if v.nbytes else grain[v.region]
    size = [
        -(-v.nbytes // grain[v.region]) * grain[v.region] if regions[v.region].on_device and v.home < 0 else 0
        for v in values
    ]
    stored = {i for i, v in enumerate(values) if v.role is Role.STORED}
    persistent = sum(size[v] for v in stored)
    needed = {i for i, v in enumerate(values) if v.role is Role.OUTPUT}
    later = sum(size[v] for v in needed)
    live = []
    for step in reversed(plan.steps):
        action = problem.actions[step.action]
        made = set(action.writes)
        later -= sum(size[v] for v in made & needed)
        needed -= made
        dying = {v for v in action.reads if v not in needed and v not in stored}
        later += sum(size[v] for v in dying)
        needed |= dying
        unit = grain[action.workspace_region]
        scratch = -(-action.workspace // unit) * unit if regions[action.workspace_region].on_device else 0
        both = _shared(problem, action, dying, size) if action.overwrites or action.parts else 0
        live.append(persistent + later + sum(size[v] for v in made) + scratch - both)
    live = live[::-1] or [0]
    given = sum(size[v] for v, value in enumerate(values) if value.role is Role.INPUT)
    live[0] = max(live[0], persistent + given)
    return live


def _shared(problem: Problem, action: Action, dying: set[int], size: list[int]) -> int:
    """The most bytes that writes can share with dying reads. Required overwrites come first. Of the other writes, the
    set with the most bytes in which each has its own read; alternating paths find it, from the largest write on.
    """
    values = problem.values
    takers: list[tuple[int, list[int]]] = []  # bytes in common, and the reads that may give them
    total, free, wanting = 0, {v for v in dying if values[v].home < 0}, set(range(len(action.writes)))
    for pair in action.overwrites:
        if pair.required:
            wanting.discard(pair.write)
            if action.reads[pair.read] in free and size[action.writes[pair.write]]:
                free.remove(action.reads[pair.read])
                total += size[action.writes[pair.write]]
    for write in wanting:
        old = [action.reads[pair.read] for pair in action.overwrites if pair.write == write]
        takers.append((size[action.writes[write]], [v for v in old if v in free]))
    for part in action.parts:
        piece = action.reads[part.read]
        unit = min(values[piece].alignment, values[action.writes[part.write]].alignment)
        if piece in free and part.offset % unit == 0:
            takers.append((size[piece], [piece]))
    giver: dict[int, int] = {}  # by read, the taker that has it
    for taker in sorted(range(len(takers)), key=lambda i: takers[i][0], reverse=True):
        before: dict[int, int] = {}  # by read on a path, the read that its taker would give up for it, or -1
        paths = [(read, -1) for read in takers[taker][1]]
        for read, from_read in paths:
            if read in before:
                continue
            before[read] = from_read
            if read in giver:
                paths += [(other, read) for other in takers[giver[read]][1]]
                continue
            while before[read] >= 0:
                giver[read] = giver[before[read]]
                read = before[read]
            giver[read] = taker
            total += takers[taker][0]
            break
    return total


def _check_figures(plan: Plan, problem: Problem, live: list[int]) -> None:
    arena = sum(height for height, region in zip(plan.heights, problem.regions) if region.on_device)
    if plan.arena_bytes != arena:
        raise VerificationError(f"arena_bytes is {plan.arena_bytes}, but the device's heights come to {arena}")
    bound, peak = max(live), plan.certificate.peak_step
    if plan.lower_bound_bytes != bound or bound > arena:
        raise VerificationError(
            f"lower_bound_bytes is {plan.lower_bound_bytes}, but the highest live set is {bound}, the arena {arena}"
        )
    if peak != live.index(bound):
        raise VerificationError(f"peak_step is {peak}, but the live set is highest at step {live.index(bound)}")
    if plan.order_lower_bound_bytes is not None and not 0 <= plan.order_lower_bound_bytes <= arena:
        raise VerificationError(f"order_lower_bound_bytes is {plan.order_lower_bound_bytes}, the arena {arena}")
    if plan.budget is not None and arena > plan.budget:
        raise VerificationError(f"the arena takes {arena} bytes, more than its budget of {plan.budget}")


class _Replay:
    """Abstract memory of every region, and where stored values are at home."""

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.plan = plan
        self.problem = problem
        self.memory = [Memory() for _ in problem.regions]
        self.where = "at the start"
        self.unit = _unit(problem)
        self.home: dict[int, int] = {}  # offsets of stored values
        self.made: set[int] = set()  # values that are there or were written; only this tells for values of no bytes
        self.guarded: list[list[tuple[int, int, int]]] = [[] for _ in problem.regions]

    # What is there before and after.

    def start(self) -> None:
        """Put inputs and stored values where the plan says."""
        values = self.problem.values
        given = [value for value, _ in self.plan.starts]
        needed = [v for v, value in enumerate(values) if value.role in (Role.INPUT, Role.STORED)]
        if sorted(given) != needed:
            self._fail(f"starts must name every input and stored value once; they name {self._names(given)}")
        for value, offset in self.plan.starts:
            low, high = self._range(value, offset)
            for _, _, content in self.memory[values[value].region].read(low, high):
                if content is not None:
                    self._fail(f"{self._name(value, low)} overlaps {self._held(content, low, high)}")
            self._write(value, offset)
            if values[value].role is Role.STORED:
                self.home[value] = offset
                if low < high:
                    self.guarded[values[value].region].append((low, high, value))
        for guarded in self.guarded:
            guarded.sort()

    def finish(self) -> None:
        """Check that outputs and stored values are where the plan says."""
        values = self.problem.values
        self.where = "at the end"
        replaced = {value.home for value in values}
        needed = {v for v, value in enumerate(values) if value.role is Role.OUTPUT}
        needed |= {v for v, value in enumerate(values) if value.role is Role.STORED and v not in replaced}
        given = [value for value, _ in self.plan.ends]
        if sorted(given) != sorted(needed):
            self._fail(f"ends must name every output and stored value once; they name {self._names(given)}")
        for value, offset in self.plan.ends:
            home = value if values[value].role is Role.STORED else values[value].home
            if home >= 0 and offset != self.home[home]:
                self._fail(f"{values[value].name!r} must be at home, offset {self.home[home]}, not at {offset}")
            self._read(value, offset)

    # One step.

    def run(self, number: int) -> None:
        """Replay one step."""
        step = self.plan.steps[number]
        action = self.problem.actions[step.action]
        self.where = f"step {number} ({action.name!r})"
        values = self.problem.values
        for value, offset in zip(action.reads, step.reads):
            self._read(value, offset)
        writes = [self._range(value, offset) for value, offset in zip(action.writes, step.writes)]
        in_place = self._in_place(action, step)
        self._check_disjoint(action, step, writes, in_place)
        if action.workspace:
            low, high = step.workspace, step.workspace + action.workspace
            self.memory[action.workspace_region].write(low, Content(high, -1, low, number))
        for value, offset in zip(action.writes, step.writes):
            if values[value].home >= 0 and offset != self.home[values[value].home]:
                home = self.home[values[value].home]
                self._fail(f"{values[value].name!r} must be written at home, offset {home}, not at {offset}")
            self._write(value, offset)

    def _in_place(self, action: Action, step: Step) -> set[tuple[int, int]]:
        """The permitted pairs (write, read) that this step takes: overwrites at the first byte, parts at their own."""
        values = self.problem.values
        permitted = [(pair.write, pair.read, 0, pair.required) for pair in action.overwrites]
        permitted += [(part.write, part.read, part.offset, False) for part in action.parts]
        taken = set()
        for write, read, offset, required in permitted:
            old, new = action.reads[read], action.writes[write]
            if step.reads[read] == step.writes[write] + offset and values[old].region == values[new].region:
                taken.add((write, read))
            elif required:
                self._fail(
                    f"{self._name(new, step.writes[write])} must take the bytes of {self._name(old, step.reads[read])}"
                )
        return taken

    def _check_disjoint(
        self, action: Action, step: Step, writes: list[tuple[int, int]], in_place: set[tuple[int, int]]
    ) -> None:
        """Writes and workspace touch neither one another, nor what is read (but for `in_place`), nor stored bytes."""
        values = self.problem.values
        taken: list[list[_Range]] = [[] for _ in self.problem.regions]
        for i, (low, high) in enumerate(writes):
            if low < high:
                taken[values[action.writes[i]].region].append((low, high, i))
        if action.workspace:
            low, high, region = step.workspace, step.workspace + action.workspace, action.workspace_region
            if low % self.unit or low < 0 or high > self.plan.heights[region]:
                self._fail(
                    f"workspace [{low}, {high}) is not aligned to {self.unit} or not within {self._region(region)}"
                )
            taken[region].append((low, high, -1))
        for region, ranges in enumerate(taken):
            ranges.sort()
            for (low, high, i), (other_low, other_high, j) in pairwise(ranges):
                if other_low < high:
                    self._collide(action, (low, high, i), self._taken(action, (other_low, other_high, j)))
            for taken_range in ranges:
                for low, _, stored in _overlaps(self.guarded[region], taken_range):
                    write = taken_range[2]
                    if write < 0 or values[action.writes[write]].home != stored:
                        self._collide(action, taken_range, f"stored {self._name(stored, low)}")
        for j, (value, offset) in enumerate(zip(action.reads, step.reads)):
            nbytes = values[value].nbytes
            for taken_range in _overlaps(taken[values[value].region], (offset, offset + nbytes, 0)) if nbytes else ():
                if (taken_range[2], j) not in in_place:
                    self._collide(action, taken_range, f"{self._name(value, offset)}, which it reads")

    # Bytes of values.

    def _range(self, value: int, offset: int) -> tuple[int, int]:
        """The addresses of a value at an offset; checks that they are aligned and within the region."""
        v = self.problem.values[value]
        if offset % v.alignment:
            self._fail(f"{self._name(value, offset)} is not aligned to {v.alignment}")
        if offset < 0 or offset + v.nbytes > self.plan.heights[v.region]:
            self._fail(f"{self._name(value, offset)} is not within {self._region(v.region)}")
        return offset, offset + v.nbytes

    def _read(self, value: int, offset: int) -> None:
        """Check that memory holds a value at an offset, whole."""
        low, high = self._range(value, offset)
        if low == high and value not in self.made:
            self._fail(f"{self._name(value, low)} is needed, but nothing has made it yet")
        for start, end, content in self.memory[self.problem.values[value].region].read(low, high):
            if content is None or content.value != value or content.base != low:
                self._fail(f"{self._name(value, low)} is needed, but {self._held(content, start, end)} is there")

    def _write(self, value: int, offset: int) -> None:
        """Put a value at an offset."""
        low, high = self._range(value, offset)
        self.made.add(value)
        if low < high:
            self.memory[self.problem.values[value].region].write(low, Content(high, value, low))

    # Names in errors.

    def _name(self, value: int, low: int) -> str:
        return f"{self.problem.values[value].name!r} at [{low}, {low + self.problem.values[value].nbytes})"

    def _names(self, values: list[int]) -> list[str]:
        count = len(self.problem.values)
        return [self.problem.values[v].name if 0 <= v < count else f"value {v}, which is not there" for v in values]

    def _region(self, region: int) -> str:
        return f"region {self.problem.regions[region].name!r} of {self.plan.heights[region]} bytes"

    def _held(self, content: Content | None, low: int, high: int) -> str:
        if content is None:
            return f"nothing, in [{low}, {high}),"
        if content.value < 0:
            return f"rubbish that the workspace of step {content.step} left in [{low}, {high})"
        name = self.problem.values[content.value].name
        return f"{name!r}, its bytes [{low - content.base}, {high - content.base}), in [{low}, {high}),"

    def _taken(self, action: Action, taken: _Range) -> str:
        low, high, write = taken
        return f"the workspace [{low}, {high})" if write < 0 else self._name(action.writes[write], low)

    def _collide(self, action: Action, taken: _Range, other: str) -> NoReturn:
        self._fail(f"{self._taken(action, taken)} is written over {other}")

    def _fail(self, what: str) -> NoReturn:
        raise VerificationError(f"{self.where}: {what}")


def _overlaps(ranges: list[_Range], wanted: _Range) -> list[_Range]:
    """The ranges that overlap the wanted one, of sorted disjoint ranges."""
    low, high, _ = wanted
    i = bisect_left(ranges, (low, 0, 0))
    if i and ranges[i - 1][1] > low:
        i -= 1
    found = []
    while i < len(ranges) and ranges[i][0] < high:
        found.append(ranges[i])
        i += 1
    return found
