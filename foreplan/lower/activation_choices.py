"""Activations by name: kept, recomputed or copied to the host, whatever the planner would do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from foreplan.base.errors import UsageError
from foreplan.base.patterns import DONE, ActivationChoices, all_scopes, by_scope, close_names, exactness
from foreplan.base.units import format_bytes
from foreplan.lower.program import ARENA, Program
from foreplan.lower.segments import backward_actions
from foreplan.lower.selective_remat import SelectiveRemat, late_actions, with_selective_remat
from foreplan.lower.target import Target
from foreplan.ops.collective import Begin
from foreplan.planner import Category, Role

_STORED = {
    Role.INPUT: "an input, which is there from the start",
    Role.STORED: "stored, and there from step to step",
    Role.OUTPUT: "returned, so it is there until the step ends",
}


@dataclass(frozen=True)
class _Match:
    """An entry that means a value.

    Attributes:
        option, entry: as the user wrote it.
        scope: the outermost scope of the value that it matches.
    """

    option: str
    entry: str
    scope: str


def with_activation_choices(program: Program, target: Target, choices: ActivationChoices) -> Program:
    """The program of a training step in which the named activations are kept, recomputed or copied, and all else is
    the planner's choice. Notes say how many there are.

    A value goes by its own name and by that of the operation that computes it. Where entries of two options mean it,
    the more exact one counts. A scope of several operations that is recomputed keeps its results, as a segment of
    `checkpoint` does: what the forward pass reads outside of it stays the planner's choice, if there is anything else
    of it that the backward pass reads. So each block of `h.*` is computed again from what the block before handed on.

    Raises:
        UsageError: an entry that means no activation, or only such that cannot be recomputed or need not; two entries,
            equally exact, that contradict each other; a program without a backward pass.
    """
    if not choices:
        return program
    if program.loss is None:
        option, _ = next(choices.entries())
        raise UsageError(f"{option} says what becomes of activations until the backward pass, and this is inference")
    return _Choice(program, choices).applied(target)


class _Choice:
    """What becomes of each value."""

    def __init__(self, program: Program, choices: ActivationChoices) -> None:
        self.program, self.late = program, late_actions(program)
        backward = backward_actions(program)
        self.scopes = {
            v: all_scopes([value.name, *(program.actions[maker].name for maker in program.producers[v])])
            for v, value in enumerate(program.values)
            if backward.isdisjoint(program.producers[v])
        }
        self.own = {v for v in self.scopes if _is_activation(program, v)}
        found: dict[int, list[_Match]] = {}
        for option, entry in choices.entries():
            for v, match in self._meant(option, entry).items():
                found.setdefault(v, []).append(match)
        self.chosen = {v: self._most_exact(v, matches) for v, matches in found.items()}
        for match in dict.fromkeys(match for match in self.chosen.values() if match.option == "recompute"):
            for v in self._results(match):
                del self.chosen[v]

    def _meant(self, option: str, entry: str) -> dict[int, _Match]:
        """The activations that an entry means."""
        pattern = entry.strip().lstrip("/")
        found = {v: scope for scope, values in by_scope(self.scopes, pattern).items() for v in values}
        own = {v: _Match(option, entry, scope) for v, scope in found.items() if v in self.own}
        if own:
            return own
        if found:
            value = self.program.values[min(found)]
            why = _STORED.get(value.role, "no activation")
            raise UsageError(f"{option} {entry!r}: {value.name!r} cannot be {DONE[option]}: it is {why}")
        close = close_names(pattern, (scope for v in sorted(self.own) for scope in self.scopes[v]))
        raise UsageError(
            f"{option}: nothing that the forward pass computes is in {entry!r}; there are {close}: an operation fused "
            "into the next one has that one's name"
        )

    def _most_exact(self, v: int, matches: Sequence[_Match]) -> _Match:
        most = max(exactness(match.entry) for match in matches)
        best = [match for match in matches if exactness(match.entry) == most]
        for other in best[1:]:
            if other.option != best[0].option:
                raise UsageError(
                    f"{best[0].option} and {other.option} both mean {self.program.values[v].name!r}, by "
                    f"{best[0].entry!r} and {other.entry!r}, which are equally exact: give one of them more of the name"
                )
        return best[0]

    def _results(self, match: _Match) -> set[int]:
        """What a scope of several operations hands on, if the backward pass reads anything else of it; else nothing."""
        program = self.program
        own = {v for v, other in self.chosen.items() if other == match}
        inside = {maker for v, names in self.scopes.items() if match.scope in names for maker in program.producers[v]}
        if len({program.calls[maker].node for v in own for maker in program.producers[v]}) < 2:
            return set()
        results = {v for v in own if not inside.union(self.late).issuperset(program.readers[v])}
        inner = own - results
        return results if any(not self.late.isdisjoint(program.readers[v]) for v in inner) else set()

    def applied(self, target: Target) -> Program:
        by_option = {option: {v for v, match in self.chosen.items() if match.option == option} for option in DONE}
        kept = by_option["keep"]
        values = tuple(replace(value, kept=value.kept or v in kept) for v, value in enumerate(self.program.values))
        program = replace(self.program, values=values)
        recompute = by_option["recompute"]
        gathered = _gathered(program) if recompute else set()  # which what is recomputed reads, and does not keep
        again = with_selective_remat(program, target, recompute | gathered, by_option["to_host"])
        for match in self.chosen.values():
            self._check_use(match, again)
        done = {"keep": kept, "recompute": again.recomputed - gathered, "to_host": again.copied}
        notes = [self._note(option, done[option]) for option in DONE if by_option[option]]
        return replace(again.program, notes=(*program.notes, *notes))

    def _check_use(self, match: _Match, again: SelectiveRemat) -> None:
        """Each entry that asks for something must have brought it."""
        if match.option == "keep":
            return
        own = {v for v, other in self.chosen.items() if other == match or self._same_entry(other, match)}
        if not own.isdisjoint(again.recomputed | again.copied):
            return
        first = min(own)
        why = again.refused.get(first, "the backward pass does not read it, so it is dropped anyway")
        name = self.program.values[first].name
        raise UsageError(f"{match.option} {match.entry!r}: nothing of it can be {DONE[match.option]}: {name!r}: {why}")

    @staticmethod
    def _same_entry(one: _Match, other: _Match) -> bool:
        return (one.option, one.entry) == (other.option, other.entry)

    def _note(self, option: str, values: Collection[int]) -> str:
        entries = dict.fromkeys(match.entry for match in self.chosen.values() if match.option == option)
        nbytes = format_bytes(sum(self.program.values[v].nbytes for v in values))
        count = f"{len(values)} activation{'s' * (len(values) != 1)}"
        return f"{option} {', '.join(map(repr, entries))}: {count}, {nbytes} together, {DONE[option]}"


def _gathered(program: Program) -> set[int]:
    """Values that are gathered from all ranks, and can be gathered again."""
    return {call.outputs[0].value for call in program.calls_of(Begin) if call.op.wait}


def _is_activation(program: Program, v: int) -> bool:
    """Whether a value is one that the planner might drop: computed within the step, and no result of it."""
    value = program.values[v]
    is_own = value.role is Role.TRANSIENT and value.region == ARENA and bool(program.producers[v])
    return is_own and value.category is not Category.GRADIENTS and value.nbytes > 0
