"""Alias sets: which writes take the bytes of a read that dies at the same step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from foreplan.base.errors import PlanError
from foreplan.base.units import align_up
from foreplan.planner.memory.liveness import LiveRanges
from foreplan.planner.problem import ALIGNMENT, Problem, Role


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
        residue: of its offset, modulo the alignment.
        lower: its first instance's; -1 for one that is there when the step begins.
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
    residue: list[int]
    lower: list[int]
    upper: list[int]
    stored: list[int]

    def nested(self, inside: Mapping[int, tuple[int, int]], wholes: Collection[int]) -> AliasSets:
        """The same once some alias sets lie in others; those that remain are numbered anew, in order.

        Args:
            inside: by alias set, the alias set in which it lies, and at which byte.
            wholes: instances that were made of parts in place.
        """
        left = [alias_set for alias_set in range(len(self.region)) if alias_set not in inside]
        number = {alias_set: i for i, alias_set in enumerate(left)}
        of, at = [], []
        for alias_set in self.of:
            offset = 0
            while alias_set in inside:
                alias_set, more = inside[alias_set]
                offset += more
            of.append(number[alias_set])
            at.append(offset)
        columns = ("region", "nbytes", "alignment", "residue", "lower", "upper", "stored")
        remaining: dict[str, list[int]] = {name: [getattr(self, name)[i] for i in left] for name in columns}
        return AliasSets(of, at, self.over, frozenset(wholes), **remaining)

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
    solid: bool = True,
    apart: Collection[int] = frozenset(),
) -> AliasSets:
    """AliasSets of one order: required overwrites always, optional ones (if `optional`) where they lower the live set.

    An optional overwrite needs a read that dies at that very step. Of those of a step, the most bytes are taken that
    can be (`matched`).

    Args:
        solid: an alias set holds all its bytes as long as it lives. So a write that is smaller than the read holds
            unused bytes. It takes the read's bytes only if the unused bytes, times the steps that it lives, are no more
            than the bytes that it saves.
        apart: instances that take no bytes that they need not take.

    Raises:
        PlanError: a required overwrite of a value that is read again later: the order is wrong.
    """
    none = len(ranges.values)
    alias_sets = AliasSets([], [0] * none, [-1] * none, frozenset(), [], [], [], [], [], [], [])
    at_home: dict[int, int] = {}
    step = -1
    pairs: dict[int, int] = {}
    for instance, v in enumerate(ranges.values):
        value = problem.values[v]
        starts = value.role in (Role.INPUT, Role.STORED)
        if not starts and ranges.lower[instance] != step:
            step = ranges.lower[instance]
            pairs = _pairs(problem, order[step], step, ranges, optional, solid, apart)
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
            alias_sets.residue.append(0)
            alias_sets.lower.append(-1 if starts else ranges.lower[instance])
            alias_sets.upper.append(ranges.upper[instance])
            alias_sets.stored.append(v if value.role is Role.STORED else -1)
            if value.role is Role.STORED:
                at_home[v] = alias_set
        alias_sets.of.append(alias_set)
        alias_sets.alignment[alias_set] = max(alias_sets.alignment[alias_set], value.alignment)
        alias_sets.upper[alias_set] = max(alias_sets.upper[alias_set], ranges.upper[instance])
    return alias_sets


def _pairs(
    problem: Problem,
    index: int,
    step: int,
    ranges: LiveRanges,
    optional: bool,
    solid: bool,
    apart: Collection[int],
) -> dict[int, int]:
    """By written instance of one step, the read instance whose bytes it takes."""
    action = problem.actions[index]
    reads, writes = ranges.reads[step], ranges.writes[step]
    pairs: dict[int, int] = {}
    wishes: dict[int, list[int]] = {}
    for pair in action.overwrites:
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
        elif optional and write not in apart and old.home < 0 and not ranges.kept[read] and new.nbytes:
            wasted = align_up(old.nbytes, ALIGNMENT) - align_up(new.nbytes, ALIGNMENT)
            if ranges.upper[read] == step + 1 and (
                not solid or wasted * (ranges.upper[write] - step - 1) <= new.nbytes
            ):
                wishes.setdefault(write, []).append(read)
    taken = {read for write, read in pairs.items() if problem.values[ranges.values[write]].nbytes}
    wishes = {
        write: [read for read in found if read not in taken] for write, found in wishes.items() if write not in pairs
    }
    return pairs | matched(wishes, {write: problem.values[ranges.values[write]].nbytes for write in wishes})


def matched(wishes: Mapping[int, Sequence[int]], nbytes: Mapping[int, int]) -> dict[int, int]:
    """The choice of a wish of each key, no wish twice, for which the keys that get one have the most bytes together.

    A greedy choice with augmenting paths finds it: such sets of keys are the independent sets of a matroid (Edmonds and
    Fulkerson, "Transversals and matroid partition", 1965).
    """
    found: dict[int, int] = {}
    for key in sorted(wishes, key=lambda key: -nbytes[key]):
        _serve(key, wishes, found)
    return found


def _serve(key: int, wishes: Mapping[int, Sequence[int]], served: dict[int, int]) -> None:
    """Give a key a wish of its own, if that is possible; other keys may change theirs."""
    holder = {wish: other for other, wish in served.items()}
    asked: dict[int, int] = {}  # by wish, the key that asked for it first
    queue = [key]
    for asking in queue:
        for wish in wishes[asking]:
            if wish in asked:
                continue
            asked[wish] = asking
            if wish in holder:
                queue.append(holder[wish])
                continue
            while wish >= 0:
                other = asked[wish]
                wish, served[other] = served.get(other, -1), wish
            return
