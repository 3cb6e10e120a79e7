"""Runs plans on real bytes, with hashes for kernels and poison wherever bytes are dead: the plans' oracle.

Every value has one right content, a hash over what its first producer reads. A kernel that reads right contents
writes right contents; one that reads anything else writes rubbish. Before it reads, a kernel spoils its workspace and
every output that is not lawfully in place; where an overwrite is required, it finds that operand at the output. Parts
that lie where they belong stay as they are, and others are copied there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from foreplan.planner import ALIGNMENT, Action, Part, Plan, Problem, Role, Step


class Harm(Exception):
    """The plan gives a wrong result, or would crash."""


def contents(problem: Problem) -> list[bytes]:
    """The right bytes of every value."""
    digests: list[bytes | None] = [None] * len(problem.values)
    for v, value in enumerate(problem.values):
        if value.role in (Role.INPUT, Role.STORED):
            digests[v] = hashlib.sha256(b"start %d" % v).digest()
    for action in problem.actions:
        read = b"".join(digests[v] or b"" for v in action.reads)
        for v in action.writes:
            if digests[v] is None:
                digests[v] = hashlib.sha256(b"value %d" % v + read).digest()
    right = [hashlib.shake_128(d or b"").digest(value.nbytes) for d, value in zip(digests, problem.values)]
    for action in problem.actions:
        for i, v in enumerate(action.writes):
            right[v] = _joined(action, i, right[v], [right[read] for read in action.reads])
    return right


def _joined(action: Action, write: int, content: bytes, reads: Sequence[bytes]) -> bytes:
    """The content of a write with those of its parts in their places."""
    whole = bytearray(content)
    for part in action.parts:
        if part.write == write:
            whole[part.offset : part.offset + len(reads[part.read])] = reads[part.read]
    return bytes(whole)


class Machine:
    """Memory of a plan's heights, in which it runs once."""

    def __init__(self, plan: Plan, problem: Problem, right: list[bytes] | None = None) -> None:
        self.plan, self.problem = plan, problem
        self.right = contents(problem) if right is None else right
        self.unit = max([ALIGNMENT, *(v.alignment for v in problem.values)])
        device = sum(h for h, region in zip(plan.heights, problem.regions) if region.on_device)
        if device > plan.arena_bytes:
            raise Harm("the regions do not fit the arena")
        self.memory = [bytearray(b"\xa5" * max(height, 0)) for height in plan.heights]

    def run(self) -> dict[int, bytes]:
        """The contents of outputs and stored values at the end, by value.

        Raises:
            Harm: something is wrong or missing at the end, misaligned, out of bounds, or an effect not happening once.
        """
        values = self.problem.values
        starts: dict[int, int] = {}
        for v, offset in self.plan.starts:
            starts[v] = offset
            self._put(v, offset, self.right[v])
        there = {v for v, value in enumerate(values) if value.role in (Role.INPUT, Role.STORED)}
        if set(starts) != there:
            raise Harm("inputs or stored values without a place")
        for number, step in enumerate(self.plan.steps):
            self._run(number, step)
        runs = Counter(step.action for step in self.plan.steps)
        if any(action.effect and runs[i] != 1 for i, action in enumerate(self.problem.actions)):
            raise Harm("an effect does not happen exactly once")
        ends = dict(self.plan.ends)
        replaced = {value.home for value in values}
        found: dict[int, bytes] = {}
        for v, value in enumerate(values):
            if value.role is Role.OUTPUT or (value.role is Role.STORED and v not in replaced):
                home = v if value.role is Role.STORED else value.home
                if v not in ends:
                    raise Harm(f"{value.name} is nowhere")
                found[v] = self._get(v, ends[v])
                at_home = found[v] if home < 0 else self._get(v, starts[home])
                if found[v] != self.right[v] or at_home != self.right[v]:
                    raise Harm(f"{value.name} is wrong")
        return found

    def _run(self, number: int, step: Step) -> None:
        action, values = self.problem.actions[step.action], self.problem.values
        sources = dict(zip(range(len(action.reads)), step.reads))
        lawful = set()
        for pair in action.overwrites:
            same = values[action.reads[pair.read]].region == values[action.writes[pair.write]].region
            if pair.required:
                sources[pair.read] = step.writes[pair.write]
            if same and (pair.required or step.reads[pair.read] == step.writes[pair.write]):
                lawful.add(pair.write)
        self._spoil(action, step)
        for i, (v, offset) in enumerate(zip(action.writes, step.writes)):
            if i not in lawful:
                spoiled = b"\x5a" * values[v].nbytes
                stay = [
                    self._get(u, o) if self._stays(action, step, i, j) else spoiled[: values[u].nbytes]
                    for j, (u, o) in enumerate(zip(action.reads, step.reads))
                ]
                self._put(v, offset, _joined(action, i, spoiled, stay))
        read = [self._get(v, sources[i]) for i, v in enumerate(action.reads)]
        right = all(found == self.right[v] for found, v in zip(read, action.reads))
        bad = hashlib.sha256(b"%d" % number + b"".join(read)).digest()
        for i, (v, offset) in enumerate(zip(action.writes, step.writes)):
            content = self.right[v] if right else hashlib.shake_128(bad).digest(values[v].nbytes)
            self._put(v, offset, _joined(action, i, content, read))
        self._spoil(action, step)

    def _stays(self, action: Action, step: Step, write: int, read: int) -> bool:
        """Whether a read lies within a write where it belongs."""
        region = [self.problem.values[v].region for v in (action.writes[write], action.reads[read])]
        lies = step.reads[read] - step.writes[write]
        return region[0] == region[1] and Part(write, read, lies) in action.parts

    def _spoil(self, action: Action, step: Step) -> None:
        if action.workspace:
            if step.workspace % self.unit:
                raise Harm("workspace misaligned")
            self._bytes(action.workspace_region, step.workspace, action.workspace)[:] = b"\x33" * action.workspace

    def _bytes(self, region: int, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or offset + nbytes > len(self.memory[region]):
            raise Harm("out of bounds")
        return memoryview(self.memory[region])[offset : offset + nbytes]

    def _put(self, v: int, offset: int, content: bytes) -> None:
        value = self.problem.values[v]
        if offset % value.alignment:
            raise Harm(f"{value.name} misaligned")
        self._bytes(value.region, offset, value.nbytes)[:] = content

    def _get(self, v: int, offset: int) -> bytes:
        value = self.problem.values[v]
        return bytes(self._bytes(value.region, offset, value.nbytes))
