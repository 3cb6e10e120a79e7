"""Alias sets: which writes take the bytes of a read that dies at the same step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from foreplan.errors import PlanError
from foreplan.planner.memory.liveness import LiveRanges
from foreplan.planner.problem import ALIGNMENT, Problem, Role
from foreplan.units import align_up


@dataclass(frozen=True)
class AliasSets:
    """Instances that follow one another in the same bytes; an alias set is one buffer to the placer.

    Attributes:
        of: the alias set of each instance.
        at: byte of the alias set at which each instance begins.
        over: the instance whose bytes each instance takes over, or -1: it starts an alias set, or is a next content of
            a stored value that its action does not read.
        wholes: instances that were made of parts in place.
        region: of each alias set.
        nbytes: its largest instance's: the first one, or a whole whose parts are made in place.
        alignment: the largest of its instances'.
        lower: its first instance's.
        upper: its last instance's.
        stored: the STORED value that it starts with, or -1.
    """

    of: list[int]
    at: list[int]
    over: list[int]
    wholes: frozenset[int]
    region: list[int]
    nbytes: list[int]
    alignment: list[int]
    lower: list[int]
    upper: list[int]
    stored: list[int]

    def within(self) -> set[int]:
        """Instances whose bytes count as those of a whole: its parts, and instances whose bytes a part took over."""
        last = {self.of[instance]: instance for instance in sorted(self.wholes)}
        return {i for i, alias_set in enumerate(self.of) if i < last.get(alias_set, 0)} if last else set()


def merge(
    problem: Problem,
    order: Sequence[int],
    ranges: LiveRanges,
    *,
    optional: bool = True,
    apart: Collection[int] = frozenset(),
) -> AliasSets:
    """AliasSets of one order: required overwrites always, optional ones (if `optional`) where they lower the live set.
    Instances in `apart` take no bytes that they need not take.

    An optional overwrite needs a read that dies at that very step. If a read could serve several writes, the largest
    gets it. A write that is smaller than the read holds unused bytes as long as it lives. So it takes the read's bytes
    only if the unused bytes, times these steps, are no more than the bytes that it saves.

    Raises:
        PlanError: a required overwrite of a value that is read again later: the order is wrong.
    """
    none = len(ranges.values)
    alias_sets = AliasSets([], [0] * none, [-1] * none, frozenset(), [], [], [], [], [], [])
    at_home: dict[int, int] = {}
    step = -1
    pairs: dict[int, int] = {}
    for instance, v in enumerate(ranges.values):
        value = problem.values[v]
        starts = value.role in (Role.INPUT, Role.STORED)
        if not starts and ranges.lower[instance] != step:
            step = ranges.lower[instance]
            pairs = _pairs(problem, order[step], step, ranges, optional, apart)
        over = -1 if starts else pairs.get(instance, -1)
        alias_sets.over[instance] = over
        if value.home >= 0:
            alias_set = at_home[value.home]
        elif over >= 0:
            alias_set = alias_sets.of[over]
        else:
            alias_set = len(alias_sets.region)
            alias_sets.region.append(value.region)
            alias_sets.nbytes.append(value.nbytes)
            alias_sets.alignment.append(value.alignment)
            alias_sets.lower.append(ranges.lower[instance])
            alias_sets.upper.append(ranges.upper[instance])
            alias_sets.stored.append(v if value.role is Role.STORED else -1)
            if value.role is Role.STORED:
                at_home[v] = alias_set
        alias_sets.of.append(alias_set)
        alias_sets.alignment[alias_set] = max(alias_sets.alignment[alias_set], value.alignment)
        alias_sets.upper[alias_set] = max(alias_sets.upper[alias_set], ranges.upper[instance])
    return alias_sets


def _pairs(
    problem: Problem, index: int, step: int, ranges: LiveRanges, optional: bool, apart: Collection[int]
) -> dict[int, int]:
    """By written instance of one step, the read instance whose bytes it takes."""
    action = problem.actions[index]
    reads, writes = ranges.reads[step], ranges.writes[step]
    pairs: dict[int, int] = {}
    candidates: list[tuple[int, int, int, int]] = []
    for i, pair in enumerate(action.overwrites):
        read, write = reads[pair.read], writes[pair.write]
        old, new = problem.values[action.reads[pair.read]], problem.values[action.writes[pair.write]]
        if new.home >= 0:
            if new.home == action.reads[pair.read]:
                pairs[write] = read
        elif pair.required:
            if ranges.kept[read] or ranges.upper[read] != step + 1:
                raise PlanError(f"step {step} ({action.name!r}) must overwrite {old.name!r}, which is needed later")
            if pairs.setdefault(write, read) != read or list(pairs.values()).count(read) > 1:
                raise PlanError(f"action {action.name!r} must put two writes over {old.name!r}, or one over two reads")
        elif not optional or write in apart or old.home >= 0 or ranges.kept[read]:
            continue
        elif ranges.upper[read] == step + 1:
            wasted = align_up(old.nbytes, ALIGNMENT) - align_up(new.nbytes, ALIGNMENT)
            if wasted * (ranges.upper[write] - step - 1) <= new.nbytes:
                candidates.append((-new.nbytes, i, write, read))
    taken = set(pairs.values())
    for _, _, write, read in sorted(candidates):
        if write not in pairs and read not in taken:
            pairs[write] = read
            taken.add(read)
    return pairs
