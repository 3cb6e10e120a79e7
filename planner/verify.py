"""The verifier: replays a plan over abstract memory and proves that every read sees its value.

It shares no code with what makes plans, only the problem's and the plan's types, and is always on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from typing import NoReturn

from foreplan.errors import VerificationError
from foreplan.planner.plan import Plan, Step
from foreplan.planner.problem import ALIGNMENT, Action, Part, Problem, Role
from foreplan.planner.replay import Content, Extents, Memory

_Range = tuple[int, int, int]  # address, end, index of the write or -1 for the workspace


def verify(plan: Plan, problem: Problem) -> None:
    """Prove that a plan is right for a problem (itself well-formed: `check_problem`), in time near-linear in its size.

    That is: it answers this problem; each effect happens exactly once; everything lies within its region and aligned;
    each read sees its value whole; writes and workspaces touch nothing that the same step reads or writes, except for
    permitted overwrites, and required ones are taken; stored bytes change to their next content only; what must be
    there at the end is; and the plan's figures are what its own offsets and lives come to.

    Raises:
        VerificationError: names the step, its action, the values and the bytes of the first thing that is wrong.
    """
    _check_form(plan, problem)
    _check_effects(plan, problem)
    replay = _Replay(plan, problem)
    replay.start()
    for number in range(len(plan.steps)):
        replay.run(number)
    replay.finish()
    _check_figures(plan, problem, replay.live_bytes())


def _check_form(plan: Plan, problem: Problem) -> None:
    if plan.problem_digest != problem.digest:
        raise VerificationError(
            f"the plan answers problem {plan.problem_digest[:12]}, not this one, {problem.digest[:12]}; plan again"
        )
    unit = max([ALIGNMENT, *(value.alignment for value in problem.values)])
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


def _check_effects(plan: Plan, problem: Problem) -> None:
    runs = Counter(step.action for step in plan.steps)
    for index, action in enumerate(problem.actions):
        if action.effect and runs[index] != 1:
            raise VerificationError(
                f"action {action.name!r} has an effect and must run once; it runs {runs[index]} times"
            )


def _check_figures(plan: Plan, problem: Problem, live: list[int]) -> None:
    arena = sum(height for height, region in zip(plan.heights, problem.regions) if region.on_device)
    if plan.arena_bytes != arena:
        raise VerificationError(f"arena_bytes is {plan.arena_bytes}, but the device's heights come to {arena}")
    bound, peak = max(live), plan.certificate.peak_step
    if plan.lower_bound_bytes != bound or bound > arena:
        raise VerificationError(
            f"lower_bound_bytes is {plan.lower_bound_bytes}, but the highest live set is {bound}, the arena {arena}"
        )
    if not 0 <= peak < len(live) or live[peak] != bound:
        raise VerificationError(f"peak_step is {peak}, but the live set is highest at step {live.index(bound)}")
    if plan.order_lower_bound_bytes is not None and not 0 <= plan.order_lower_bound_bytes <= arena:
        raise VerificationError(f"order_lower_bound_bytes is {plan.order_lower_bound_bytes}, the arena {arena}")
    if plan.budget is not None and arena > plan.budget:
        raise VerificationError(f"the arena takes {arena} bytes, more than its budget of {plan.budget}")


class _Replay:
    """Abstract memory, and for every instance (one write of a value) when it was written and last read."""

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.plan = plan
        self.problem = problem
        self.memory = [Memory() for _ in problem.regions]
        self.where = "at the start"
        self.home: dict[int, int] = {}  # offsets of stored values
        self.guarded: list[list[tuple[int, int, int]]] = [[] for _ in problem.regions]
        self.joins: dict[int, list[tuple[int, Part]]] = {}
        for index in sorted({step.action for step in plan.steps}):
            action = problem.actions[index]
            for value, part in zip(action.reads, action.parts):
                self.joins.setdefault(value, []).append((action.writes[0], part))
        self.extents: dict[int, Extents | None] = {}
        self.value: list[int] = []
        self.written: list[int] = []
        self.first: list[int] = []  # the step from which it counts
        self.last: list[int] = []

    # What is there before and after.

    def start(self) -> None:
        """Put inputs and stored values where the plan says."""
        values = self.problem.values
        given = [value for value, _ in self.plan.starts]
        needed = [v for v, value in enumerate(values) if value.role in (Role.INPUT, Role.STORED)]
        if sorted(given) != needed:
            self._fail(f"starts must name every input and stored value once; they name {self._names(given)}")
        for value, offset in self.plan.starts:
            runs = self._runs(value, offset)
            for low, high, _ in runs:
                for _, _, content in self.memory[values[value].region].read(low, high):
                    if content is not None:
                        self._fail(f"{self._name(value, low, high)} overlaps {self._held(content, low, high)}")
            self._write(value, runs, 0)
            if values[value].role is Role.STORED:
                self.home[value] = offset
                self.guarded[values[value].region] += [(low, high, value) for low, high, _ in runs]
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
            self._read(value, self._runs(value, offset), len(self.plan.steps) - 1)

    # One step.

    def run(self, number: int) -> None:
        """Replay one step."""
        step = self.plan.steps[number]
        action = self.problem.actions[step.action]
        self.where = f"step {number} ({action.name!r})"
        if action.parts:
            self._join(action, step, number)
            return
        values = self.problem.values
        reads = [self._runs(value, offset) for value, offset in zip(action.reads, step.reads)]
        for value, runs in zip(action.reads, reads):
            self._read(value, runs, number)
        writes = [self._runs(value, offset) for value, offset in zip(action.writes, step.writes)]
        in_place = self._overwrites(action, step, reads, writes)
        self._check_disjoint(action, step, reads, writes, in_place)
        if action.workspace:
            low, high = step.workspace, step.workspace + action.workspace
            self.memory[action.workspace_region].write(low, Content(high, -1, low, number))
        for i, (value, runs) in enumerate(zip(action.writes, writes)):
            if values[value].home >= 0 and step.writes[i] != self.home[values[value].home]:
                home = self.home[values[value].home]
                self._fail(f"{values[value].name!r} must be written at home, offset {home}, not at {step.writes[i]}")
            self._write(value, runs, number, taken_over=any(i == write for write, _ in in_place))

    def _overwrites(
        self, action: Action, step: Step, reads: list[list[_Range]], writes: list[list[_Range]]
    ) -> set[tuple[int, int]]:
        """The permitted pairs (write, read) that this step takes: same first byte, and no gaps of their own."""
        taken = set()
        for pair in action.overwrites:
            old, new = action.reads[pair.read], action.writes[pair.write]
            same = step.reads[pair.read] == step.writes[pair.write]
            same = same and self.problem.values[old].region == self.problem.values[new].region
            whole = len(reads[pair.read]) <= 1 and len(writes[pair.write]) <= 1
            if same and (whole or reads[pair.read] == writes[pair.write]):
                taken.add((pair.write, pair.read))
            elif pair.required:
                self._fail(
                    f"{self._name(new, step.writes[pair.write])} must take the bytes of "
                    f"{self._name(old, step.reads[pair.read])}"
                )
        return taken

    def _check_disjoint(
        self,
        action: Action,
        step: Step,
        reads: list[list[_Range]],
        writes: list[list[_Range]],
        in_place: set[tuple[int, int]],
    ) -> None:
        """Writes and workspace touch neither one another, nor what is read (but for `in_place`), nor stored bytes."""
        values = self.problem.values
        taken: list[list[_Range]] = [[] for _ in self.problem.regions]
        for i, runs in enumerate(writes):
            taken[values[action.writes[i]].region] += [(low, high, i) for low, high, _ in runs]
        if action.workspace:
            low, high, region = step.workspace, step.workspace + action.workspace, action.workspace_region
            if low % ALIGNMENT or low < 0 or high > self.plan.heights[region]:
                self._fail(
                    f"workspace [{low}, {high}) is not aligned to {ALIGNMENT} or not within {self._region(region)}"
                )
            taken[region].append((low, high, -1))
        for region, ranges in enumerate(taken):
            ranges.sort()
            for (low, high, i), (other_low, other_high, j) in pairwise(ranges):
                if other_low < high:
                    self._collide(action, (low, high, i), self._taken(action, (other_low, other_high, j)))
            for taken_range in ranges:
                for low, high, stored in _overlaps(self.guarded[region], taken_range):
                    write = taken_range[2]
                    if write < 0 or values[action.writes[write]].home != stored:
                        self._collide(action, taken_range, f"stored {self._name(stored, low, high)}")
        for j, runs in enumerate(reads):
            value = action.reads[j]
            for low, high, _ in runs:
                for taken_range in _overlaps(taken[values[value].region], (low, high, 0)):
                    if (taken_range[2], j) not in in_place:
                        self._collide(action, taken_range, f"{self._name(value, low, high)}, which it reads")

    def _join(self, action: Action, step: Step, number: int) -> None:
        """Check that every read lies inside the one write where its part says, and rename the bytes."""
        value, offset = action.writes[0], step.writes[0]
        extents = self._extents(value)
        first = extents.runs[0][1] if extents.runs else 0
        if self.problem.values[value].home >= 0 or action.workspace:
            self._fail("a join must have neither a workspace nor a write with a home")
        if sum(self.problem.values[v].nbytes for v in action.reads) != self.problem.values[value].nbytes:
            self._fail(f"the parts do not fill {self.problem.values[value].name!r}")
        for v, at, part in zip(action.reads, step.reads, action.parts):
            nbytes = self.problem.values[v].nbytes
            inside = extents.inside(part.offset, part.run, part.stride, nbytes)
            runs = [(low + offset - first, low + offset - first + n, byte) for byte, low, n in inside.runs]
            if len(inside) != nbytes or (runs and runs[0][0] != at):
                self._fail(f"{self._name(v, at)} does not lie in its part of {self._name(value, offset)}")
            self._read(v, runs, number)
        self._write(value, self._runs(value, offset), number, taken_over=True)

    # Bytes of values.

    def _extents(self, value: int) -> Extents:
        """Where a value's bytes lie relative to one another: in one piece, or as the joins of this plan say."""
        if value not in self.joins:
            return Extents.whole(self.problem.values[value].nbytes)
        if value not in self.extents:
            self.extents[value] = None
            joined, part = self.joins[value][0]
            nbytes = self.problem.values[value].nbytes
            self.extents[value] = self._extents(joined).inside(part.offset, part.run, part.stride, nbytes)
        found = self.extents[value]
        if found is None or len(found) != self.problem.values[value].nbytes:
            self._fail(f"{self.problem.values[value].name!r} does not lie within what it is joined into")
        return found

    def _runs(self, value: int, offset: int) -> list[_Range]:
        """Addresses, ends and first bytes of a value's runs; checks that they are aligned and within the region."""
        v = self.problem.values[value]
        if value in self.joins:
            runs = self._extents(value).runs
            first = runs[0][1] if runs else 0
            ranges = [(low + offset - first, low + offset - first + n, byte) for byte, low, n in runs]
        else:
            ranges = [(offset, offset + v.nbytes, 0)] if v.nbytes else []
        if offset % v.alignment:
            self._fail(f"{self._name(value, offset)} is not aligned to {v.alignment}")
        if not 0 <= offset <= self.plan.heights[v.region] or any(
            low < 0 or high > self.plan.heights[v.region] for low, high, _ in ranges
        ):
            self._fail(f"{self._name(value, offset)} is not within {self._region(v.region)}")
        return ranges

    def _read(self, value: int, runs: list[_Range], number: int) -> None:
        """Check that memory holds a value in these runs, and note that its instances lived until this step."""
        memory = self.memory[self.problem.values[value].region]
        for low, high, byte in runs:
            for start, end, content in memory.read(low, high):
                if content is None or not self._is(content.value, start - content.base, value, byte + start - low):
                    self._fail(
                        f"{self._name(value, low, high)} is needed, but {self._held(content, start, end)} is there"
                    )
                self.last[content.instance] = max(self.last[content.instance], number)

    def _is(self, held: int, held_byte: int, value: int, byte: int) -> bool:
        """Whether one value's byte is another's: the same, or the latter is joined into the former there."""
        if held == value:
            return held_byte == byte
        return any(
            self._is(held, held_byte, joined, part.offset + byte // part.run * part.stride + byte % part.run)
            for joined, part in self.joins.get(value, ())
            if part.run
        )

    def _write(self, value: int, runs: list[_Range], number: int, *, taken_over: bool = False) -> None:
        """Put a value into these runs; bytes that it takes from another of this step count as its own from the next."""
        instance = len(self.value)
        self.value.append(value)
        self.written.append(number)
        self.first.append(number + taken_over)
        self.last.append(-1)
        memory = self.memory[self.problem.values[value].region]
        for low, high, byte in runs:
            memory.write(low, Content(high, value, low - byte, instance))

    # Figures.

    def live_bytes(self) -> list[int]:
        """Bytes on the device that are needed at each step, each rounded up to its region's smallest alignment."""
        values, regions = self.problem.values, self.problem.regions
        grain = [ALIGNMENT] * len(regions)
        for v in values:
            if v.nbytes:
                grain[v.region] = min(grain[v.region], v.alignment)
        change = [0] * (max(len(self.plan.steps), 1) + 2)
        for index, written, first, last in zip(self.value, self.written, self.first, self.last):
            v = values[index]
            if not regions[v.region].on_device or v.home >= 0:
                continue
            nbytes = v.nbytes if index in self.joins else -(-v.nbytes // grain[v.region]) * grain[v.region]
            if v.role is Role.STORED:
                last = len(change) - 3
            change[first] += nbytes
            change[max(last, written) + 1] -= nbytes
        for number, step in enumerate(self.plan.steps):
            action = self.problem.actions[step.action]
            if action.workspace and regions[action.workspace_region].on_device:
                unit = grain[action.workspace_region]
                change[number] += -(-action.workspace // unit) * unit
                change[number + 1] -= -(-action.workspace // unit) * unit
        live = [change[0]]
        for delta in change[1:-2]:
            live.append(live[-1] + delta)
        return live

    # People.

    def _name(self, value: int, low: int, high: int | None = None) -> str:
        high = low + self.problem.values[value].nbytes if high is None else high
        return f"{self.problem.values[value].name!r} at [{low}, {high})"

    def _names(self, values: list[int]) -> list[str]:
        count = len(self.problem.values)
        return [self.problem.values[v].name if 0 <= v < count else f"value {v}, which is not there" for v in values]

    def _region(self, region: int) -> str:
        return f"region {self.problem.regions[region].name!r} of {self.plan.heights[region]} bytes"

    def _held(self, content: Content | None, low: int, high: int) -> str:
        if content is None:
            return f"nothing, in [{low}, {high}),"
        if content.value < 0:
            return f"rubbish that the workspace of step {content.instance} left in [{low}, {high})"
        name = self.problem.values[content.value].name
        return f"{name!r}, its bytes [{low - content.base}, {high - content.base}), in [{low}, {high}),"

    def _taken(self, action: Action, taken: _Range) -> str:
        low, high, write = taken
        return f"the workspace [{low}, {high})" if write < 0 else self._name(action.writes[write], low, high)

    def _collide(self, action: Action, taken: _Range, other: str) -> NoReturn:
        self._fail(f"{self._taken(action, taken)} is written over {other}")

    def _fail(self, what: str) -> NoReturn:
        raise VerificationError(f"{self.where}: {what}")


def _overlaps(ranges: list[_Range], wanted: _Range) -> list[_Range]:
    """Those of sorted disjoint ranges that overlap another."""
    low, high, _ = wanted
    i = bisect_left(ranges, (low, 0, 0))
    if i and ranges[i - 1][1] > low:
        i -= 1
    found = []
    while i < len(ranges) and ranges[i][0] < high:
        found.append(ranges[i])
        i += 1
    return found
