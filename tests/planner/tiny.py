"""Tiny problems drawn without regard to what planners like, and every placement of them, by exhaustive search.

Memory is a row of cells, as large as the smallest alignment; a cell holds a piece of a value, or nothing. The search
goes over all contents that memory can have, so it knows nothing of lives, chains or sharing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from foreplan.planner import ALIGNMENT, Action, Overwrite, Part, Plan, Problem, Region, Role, Step, Value
from foreplan.planner.plan import Certificate

Cell = tuple[int, int] | None  # a value and which of its cells
Memory = tuple[tuple[Cell, ...], ...]  # by region


def draw(rng: random.Random, most: int = 4) -> Problem:
    """One to `most` actions over few values: inputs that nobody reads, results of any size over any read, values of no
    bytes, required and optional overwrites, parts with room between them, next contents at home, several producers,
    effects, one or two regions on the device and one off it.
    """
    cell = rng.choice([32, 64, 64])
    regions = [Region("a"), *([Region("b")] if rng.random() < 0.3 else [])]
    if rng.random() < 0.08:
        regions.append(Region("host", on_device=False))
    values: list[Value] = []

    def value(role: Role, cells: int | None = None, region: int | None = None, home: int = -1) -> int:
        cells = rng.choice([0, 1, 1, 1, 2, 2, 3]) if cells is None else cells
        nbytes = max(cells * cell - rng.choice([0, 0, 0, 5]), 0)
        if home >= 0:
            nbytes = values[home].nbytes
        region = rng.choice([0, 0, 0, *range(len(regions))]) if region is None else region
        alignment = rng.choice([cell, cell, cell, 2 * cell])
        values.append(Value(f"v{len(values)}", nbytes, alignment, region, role=role, home=home))
        return len(values) - 1

    there = [value(Role.INPUT) for _ in range(rng.randint(0, 2))]
    stored = [value(Role.STORED, rng.choice([1, 1, 2])) for _ in range(rng.choice([0, 0, 1]))]
    there += stored
    gone: set[int] = set()
    actions: list[Action] = []
    for number in range(rng.randint(1, most)):
        usable = [v for v in there if v not in gone]
        reads = rng.sample(usable, min(len(usable), rng.choice([0, 1, 1, 2, 2, 3])))
        if stored and rng.random() < 0.3:
            old = stored.pop()
            new = value(Role.OUTPUT, region=values[old].region, home=old)
            reads = [old, *[v for v in reads if v != old]] if rng.random() < 0.7 else [v for v in reads if v != old]
            pairs = [Overwrite(0, 0, rng.random() < 0.5)] if old in reads else []
            actions.append(Action(f"update{number}", tuple(reads), (new,), tuple(pairs), effect=rng.random() < 0.7))
            gone.add(old)
            there.append(new)
            continue
        if reads and rng.random() < 0.35 and (joined := _join(rng, values, reads, value, f"join{number}")):
            actions.append(joined)
            there += joined.writes
            continue
        again = [v for v in there if values[v].role in (Role.TRANSIENT, Role.OUTPUT) and values[v].home < 0]
        if again and rng.random() < 0.2:  # another producer of something, from less
            v = rng.choice(again)
            maker = next(i for i, action in enumerate(actions) if v in action.writes)
            known = {i for i, each in enumerate(values[: min(actions[maker].writes)]) if each.home < 0} - gone
            reads, writes = [r for r in reads if r in known and r < v], [v]
        else:
            writes = [
                value(rng.choice([Role.TRANSIENT, Role.TRANSIENT, Role.OUTPUT])) for _ in range(rng.choice([1, 1, 2]))
            ]
        pairs = [
            Overwrite(w, r)
            for (w, new), (r, old) in itertools.product(enumerate(writes), enumerate(reads))
            if values[new].nbytes <= values[old].nbytes and values[new].region == values[old].region
            if rng.random() < 0.6
        ]
        if pairs and rng.random() < 0.3:
            pick = rng.randrange(len(pairs))
            old = reads[pairs[pick].read]
            if values[old].role in (Role.INPUT, Role.TRANSIENT):
                pairs[pick] = Overwrite(pairs[pick].write, pairs[pick].read, True)
                gone.add(old)
        scratch = rng.choice([0, 0, cell, 2 * cell, 3 * cell])
        actions.append(
            Action(
                f"a{number}",
                tuple(reads),
                tuple(writes),
                tuple(pairs),
                workspace=scratch,
                workspace_region=rng.randrange(len(regions)),
                nanoseconds=rng.choice([0, 1, 7]),
                effect=rng.random() < 0.15,
            )
        )
        there += [v for v in writes if v not in there]
    return Problem(tuple(values), tuple(actions), tuple(regions))


def _join(rng: random.Random, values: list[Value], reads: list[int], value, name: str) -> Action | None:  # type: ignore[no-untyped-def]
    region = values[reads[0]].region
    pieces = [v for v in reads if values[v].region == region and values[v].role is not Role.STORED]
    cell = min(v.alignment for v in values)
    offset, where = 0, []
    for v in pieces:
        if values[v].home >= 0:
            return None
        offset = -(-offset // cell) * cell + cell * rng.choice([0, 0, 0, 1])
        where.append(Part(0, reads.index(v), offset))
        offset += values[v].nbytes
    if not where or offset > 5 * cell:
        return None
    whole = value(rng.choice([Role.TRANSIENT, Role.OUTPUT]), -(-offset // cell) + rng.choice([0, 0, 1]), region)
    if values[whole].nbytes < offset:
        values[whole] = Value(values[whole].name, offset, cell, region, role=values[whole].role)
    return Action(name, tuple(reads), (whole,), parts=tuple(where), workspace=rng.choice([0, 0, cell]))


def orders(rng: random.Random, problem: Problem, count: int) -> Iterator[list[int]]:
    """Random sequences of actions in which each finds what it reads, every effect happens once and every output is
    made; some compute a value again.
    """
    values, actions = problem.values, problem.actions
    outputs = {v for v, value in enumerate(values) if value.role is Role.OUTPUT}
    effects = {i for i, action in enumerate(actions) if action.effect}
    for _ in range(count):
        made = {v for v, value in enumerate(values) if value.role in (Role.INPUT, Role.STORED)}
        order: list[int] = []
        for _ in range(2 * len(actions) + 3):
            if outputs <= made and effects <= set(order) and rng.random() < 0.5:
                break
            new = [i for i, a in enumerate(actions) if made.issuperset(a.reads) and i not in order]
            old = [i for i in order if not actions[i].effect and all(values[v].home < 0 for v in actions[i].writes)]
            choices = old if old and (not new or rng.random() < 0.15) else new
            if not choices:
                break
            order.append(rng.choice(choices))
            made.update(actions[order[-1]].writes)
        if outputs <= made and effects <= set(order):
            yield order


class TooLarge(Exception):
    """The search would take too long."""


class Cells:
    """Exhaustive search over the contents of memory.

    Attributes:
        cell: bytes of a cell: the smallest alignment.
        work: ways to run an action that may still be looked at; `TooLarge` after them.
    """

    def __init__(self, problem: Problem, work: int = 4000) -> None:
        self.problem = problem
        self.work = work
        self.cell = min([ALIGNMENT, *(v.alignment for v in problem.values)])
        self.unit = max([ALIGNMENT, *(v.alignment for v in problem.values)])
        self.cells = [-(-v.nbytes // self.cell) for v in problem.values]
        self.roles = [v.role for v in problem.values]
        self.ends = {v for v, role in enumerate(self.roles) if role is Role.OUTPUT}

    def heights(self, arena: int) -> Iterator[list[int]]:
        """Every way in which the device's regions can share a number of bytes; a region off it has room for all."""
        on_device = [i for i, region in enumerate(self.problem.regions) if region.on_device]
        units = arena // self.unit
        for cuts in itertools.product(range(units + 1), repeat=len(on_device) - 1):
            if sum(cuts) <= units:
                heights = [self._host(r) for r in range(len(self.problem.regions))]
                for region, height in zip(on_device, (*cuts, units - sum(cuts))):
                    heights[region] = height * self.unit // self.cell
                yield heights

    def fits(self, order: Sequence[int], arena: int) -> Plan | None:
        """A plan of an order within a number of bytes, wherever its values lie; None where there is none."""
        if arena < 0:
            return None
        for heights in self.heights(arena):
            for starts, memory in self._begin(heights):
                if (steps := self._run(order, 0, memory, heights, starts[1], {})) is not None:
                    return self._plan(heights, starts[0], *steps)
        return None

    def any_fits(self, arena: int) -> bool:
        """Whether any sequence of actions, of any length, fits into a number of bytes."""
        if arena < 0:
            return False
        effects = [i for i, action in enumerate(self.problem.actions) if action.effect]
        everything = set(range(len(self.problem.values)))
        given = {v for v, role in enumerate(self.roles) if role in (Role.INPUT, Role.STORED)}
        for heights in self.heights(arena):
            for (_, homes), memory in self._begin(heights):
                empty = {v for v, cells in enumerate(self.cells) if not cells and v not in given}
                seen = {(memory, frozenset[int](), frozenset[int]())}
                queue = list(seen)
                for memory, done, made in queue:
                    ended = len(done) == len(effects) and made >= self.ends & empty
                    if ended and self._end(memory, homes) is not None:
                        return True
                    for i, action in enumerate(self.problem.actions):
                        if i in done or not made >= empty.intersection(action.reads):
                            continue
                        later = done | {i} if action.effect else done, made | empty.intersection(action.writes)
                        for _, after in self._steps(i, memory, heights, homes, everything):
                            state = (after, *later)
                            if state not in seen:
                                seen.add(state)
                                queue.append(state)
        return False

    def _host(self, region: int) -> int:
        values = [cells for cells, v in zip(self.cells, self.problem.values) if v.region == region]
        scratch = [a.workspace for a in self.problem.actions if a.workspace_region == region]
        return sum(values) + -(-max(scratch, default=0) // self.cell)

    # Moves.

    def _begin(self, heights: list[int]) -> Iterator[tuple[tuple[dict[int, int], dict[int, int]], Memory]]:
        given = [v for v, role in enumerate(self.roles) if role in (Role.INPUT, Role.STORED)]

        def put(left: list[int], memory: Memory, at: dict[int, int]) -> Iterator[tuple[dict[int, int], Memory]]:
            if not left:
                yield at, memory
                return
            v, region = left[0], self.problem.values[left[0]].region
            for offset in self._offsets(v, heights):
                if all(memory[region][c] is None for c in range(offset, offset + self.cells[v])):
                    yield from put(left[1:], self._write(memory, v, offset), at | {v: offset})

        for at, memory in put(given, tuple((None,) * h for h in heights), {}):
            yield (at, {v: at[v] for v in given if self.roles[v] is Role.STORED}), memory

    def _offsets(self, v: int, heights: list[int]) -> range:
        value = self.problem.values[v]
        if not self.cells[v]:
            return range(1)
        return range(0, heights[value.region] - self.cells[v] + 1, value.alignment // self.cell)

    def _write(self, memory: Memory, v: int, offset: int) -> Memory:
        region = self.problem.values[v].region
        row = memory[region]
        new = tuple((v, k) for k in range(self.cells[v]))
        return (*memory[:region], row[:offset] + new + row[offset + len(new) :], *memory[region + 1 :])

    def _found(self, memory: Memory, v: int) -> list[int]:
        """Where a value lies, whole."""
        if not self.cells[v]:
            return [0]
        row, n = memory[self.problem.values[v].region], self.cells[v]
        return [c for c in range(len(row) - n + 1) if all(row[c + k] == (v, k) for k in range(n))]

    def _steps(
        self, index: int, memory: Memory, heights: list[int], homes: dict[int, int], needed: set[int]
    ) -> Iterator[tuple[tuple[int, Sequence[int], Sequence[int], int], Memory]]:
        """Every way to run an action, in cells, and memory after it; what is not needed any more is forgotten."""
        action, values = self.problem.actions[index], self.problem.values
        unit, scratch = self.unit // self.cell, -(-action.workspace // self.cell)
        room = range(0, heights[action.workspace_region] - scratch + 1, unit) if scratch else range(1)
        pairs = {(p.write, p.read): (0, p.required) for p in action.overwrites}
        pairs |= {(p.write, p.read): (p.offset, False) for p in action.parts}
        for reads in itertools.product(*[self._found(memory, v) for v in action.reads]):
            for writes in itertools.product(*[self._offsets(v, heights) for v in action.writes]):
                self.work -= 1
                if self.work < 0:
                    raise TooLarge
                held = [
                    (values[v].region, o, o + self.cells[v], r) for r, (v, o) in enumerate(zip(action.reads, reads))
                ]
                made = [(values[v].region, o, o + self.cells[v]) for v, o in zip(action.writes, writes)]
                lies = {
                    pair
                    for pair, (offset, _) in pairs.items()
                    if values[action.reads[pair[1]]].region == values[action.writes[pair[0]]].region
                    and (writes[pair[0]] * self.cell + offset == reads[pair[1]] * self.cell)
                }
                if any(must and pair not in lies for pair, (_, must) in pairs.items()):
                    continue
                if not self._apart(made, held, lies) or not self._at_home(action, writes, made, homes):
                    continue
                after = memory
                for v, offset in zip(action.writes, writes):
                    after = self._write(after, v, offset)
                for at in room:
                    work = (action.workspace_region, at, at + scratch)
                    if any(_meet(work, other) for other in [*made, *[h[:3] for h in held]]) or any(
                        _meet(work, (values[s].region, o, o + self.cells[s])) for s, o in homes.items()
                    ):
                        continue
                    yield (index, reads, writes, at), self._forget(after, work, needed)

    def _apart(
        self, made: list[tuple[int, int, int]], held: list[tuple[int, int, int, int]], lies: set[tuple[int, int]]
    ) -> bool:
        if any(_meet(a, b) for a, b in itertools.combinations(made, 2)):
            return False
        return not any(_meet(new, old[:3]) and (w, old[3]) not in lies for w, new in enumerate(made) for old in held)

    def _at_home(
        self, action: Action, writes: Sequence[int], made: list[tuple[int, int, int]], homes: dict[int, int]
    ) -> bool:
        values = self.problem.values
        for v, offset, new in zip(action.writes, writes, made):
            home = values[v].home
            if home >= 0 and homes[home] != offset:
                return False
            for stored, at in homes.items():
                if stored != home and _meet(new, (values[stored].region, at, at + self.cells[stored])):
                    return False
        return True

    def _forget(self, memory: Memory, work: tuple[int, int, int], needed: set[int]) -> Memory:
        return tuple(
            tuple(
                None
                if cell is None or cell[0] not in needed or (region == work[0] and work[1] <= c < work[2])
                else cell
                for c, cell in enumerate(row)
            )
            for region, row in enumerate(memory)
        )

    def _step(self, index: int, reads: Sequence[int], writes: Sequence[int], workspace: int) -> Step:
        cell = self.cell
        return Step(index, tuple(cell * o for o in reads), tuple(cell * o for o in writes), cell * workspace)

    def _end(self, memory: Memory, homes: dict[int, int]) -> list[tuple[int, int]] | None:
        """Where outputs and stored values lie, if all are there."""
        values, found = self.problem.values, []
        replaced = {value.home for value in values}
        for v, value in enumerate(values):
            if v in self.ends or (value.role is Role.STORED and v not in replaced):
                home = value.home if value.home >= 0 else v
                at = [o for o in self._found(memory, v) if home not in homes or homes[home] == o]
                if not at and self.cells[v]:
                    return None
                found.append((v, self.cell * (homes[home] if home in homes else at[0])))
        return found

    def _run(
        self,
        order: Sequence[int],
        number: int,
        memory: Memory,
        heights: list[int],
        homes: dict[int, int],
        dead: dict[tuple[int, Memory], bool],
    ) -> tuple[list[Step], list[tuple[int, int]]] | None:
        if number == len(order):
            ends = self._end(memory, homes)
            return None if ends is None else ([], ends)
        if (number, memory) in dead:
            return None
        needed = {v for index in order[number + 1 :] for v in self.problem.actions[index].reads} | self.ends
        needed |= set(homes)
        for step, after in self._steps(order[number], memory, heights, homes, needed):
            rest = self._run(order, number + 1, after, heights, homes, dead)
            if rest is not None:
                return [self._step(*step), *rest[0]], rest[1]
        dead[number, memory] = True
        return None

    def _plan(self, heights: list[int], starts: dict[int, int], steps: list[Step], ends: list[tuple[int, int]]) -> Plan:
        used = [-(-h * self.cell // self.unit) * self.unit for h in heights]
        arena = sum(h for h, region in zip(used, self.problem.regions) if region.on_device)
        return Plan(
            self.problem.digest,
            tuple(steps),
            tuple((v, self.cell * o) for v, o in starts.items()),
            tuple(ends),
            tuple(used),
            arena,
            0,
            None,
            Certificate(0, "by brute force", "any"),
        )


def _meet(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and a[1] < a[2] and b[1] < b[2]
