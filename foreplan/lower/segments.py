"""Segments by name: which actions of a program a name or pattern means, for recomputing them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreplan.base.errors import UsageError
from foreplan.base.patterns import TO, all_scopes, by_scope, close_names
from foreplan.lower.program import Program
from foreplan.planner import Category


@dataclass(frozen=True)
class Segment:
    """Operations of the forward pass that are recomputed together.

    Attributes:
        name: the scope, or the range as the user wrote it.
        entry: what the user wrote.
        actions: of the program, ascending.
    """

    name: str
    entry: str
    actions: tuple[int, ...]


def find_segments(program: Program, entries: Sequence[str]) -> tuple[Segment, ...]:
    """The segments that entries name.

    An operation is in the scopes of its name, and in those of its results' names, for ONNX files whose operations have
    no names: see `foreplan.base.patterns`.

    Args:
        entries: each a scope, such as `layer1`; a pattern, where each scope that matches is a segment of its own, the
            outermost counting; or a range `FIRST..LAST` of two scopes: what the model lists from the first operation of
            the one to the last of the other.

    Raises:
        UsageError: an entry that names nothing (with what comes close), an operation in two segments, or a program
            without a backward pass.
    """
    if program.loss is None:
        raise UsageError("checkpoint recomputes for the backward pass, and this is inference: give a loss")
    gradients = backward_actions(program)
    scopes = {i: _scopes(program, i) for i in range(len(program.actions)) if i not in gradients}
    found: dict[str, tuple[str, list[int]]] = {}
    taken: dict[int, str] = {}
    for entry in entries:
        for name, actions in _matches(program, scopes, entry).items():
            for action in actions:
                if taken.setdefault(action, name) != name:
                    raise UsageError(
                        f"checkpoint: {program.actions[action].name!r} is in two segments, {taken[action]!r} and "
                        f"{name!r}; segments cannot overlap"
                    )
            found.setdefault(name, (entry, actions))
    _absorb(program, set(range(len(program.actions))) - taken.keys() - forward_actions(program), taken)
    members: dict[str, list[int]] = {name: [] for name in found}
    for action in sorted(taken):
        members[taken[action]].append(action)
    return tuple(Segment(name, found[name][0], _needing(program, actions)) for name, actions in members.items())


def _needing(program: Program, actions: Sequence[int]) -> tuple[int, ...]:
    """Without updates that read nothing of the segment, such as a counter: an order may run these at the very end."""
    made = {
        value for action in actions for value in program.actions[action].writes if not program.actions[action].effect
    }
    reads = (set(program.actions[action].reads) for action in actions)
    return tuple(a for a, read in zip(actions, reads) if not program.actions[a].effect or not made.isdisjoint(read))


def forward_actions(program: Program) -> frozenset[int]:
    """Actions that the loss and the outputs depend on."""
    return actions_behind(program, results_of(program))


def results_of(program: Program) -> list[int]:
    """The values of the outputs and of the loss."""
    return [slot.operand.value for slot in (*program.outputs, *([program.loss] if program.loss else []))]


def actions_behind(program: Program, values: Iterable[int]) -> frozenset[int]:
    """Actions that values depend on."""
    left, found = list(values), set[int]()
    while left:
        for action in program.producers[left.pop()]:
            if action not in found:
                found.add(action)
                left += program.actions[action].reads
    return frozenset(found)


def backward_actions(program: Program) -> set[int]:
    """Actions of the backward pass: those that write a gradient or read something made from one."""
    made = {v for v, value in enumerate(program.values) if value.category is Category.GRADIENTS}
    forward = forward_actions(program)
    found: set[int] = set()
    for index, action in enumerate(program.actions):
        if index not in forward and not made.isdisjoint((*action.reads, *action.writes)):
            found.add(index)
            made.update(action.writes)
    return found


def _scopes(program: Program, index: int) -> tuple[str, ...]:
    """Of an operation's name, then of the names of its results; outer ones first."""
    action = program.actions[index]
    return all_scopes([action.name, *(program.values[v].name for v in action.writes)])


def _matches(program: Program, scopes: dict[int, tuple[str, ...]], entry: str) -> dict[str, list[int]]:
    """Actions by segment that one entry means."""
    first, to, last = entry.partition(TO)
    if to:
        forward = forward_actions(program)
        ahead = {action: names for action, names in scopes.items() if action in forward}
        ends = [_members(ahead, end.strip().lstrip("/"), entry) for end in (first, last)]
        if min(ends[0]) > max(ends[1]):
            raise UsageError(f"checkpoint {entry!r}: the model has {last.strip()!r} before {first.strip()!r}")
        return {entry: [action for action in scopes if min(ends[0]) <= action <= max(ends[1])]}
    pattern = entry.strip().lstrip("/")
    found = by_scope(scopes, pattern)
    if not found:
        raise _unknown(scopes, pattern, entry)
    return found


def _members(scopes: dict[int, tuple[str, ...]], name: str, entry: str) -> list[int]:
    found = [action for action, names in scopes.items() if name in names]
    if not found:
        raise _unknown(scopes, name, entry)
    return found


def _unknown(scopes: dict[int, tuple[str, ...]], name: str, entry: str) -> UsageError:
    close = close_names(name, (scope for names in scopes.values() for scope in names))
    where = "" if name == entry.strip() else f", part of {entry!r}"
    return UsageError(
        f"checkpoint: no operation of the forward pass is in {name!r}{where}; "
        f"there are {close}: an operation fused into the next one has that one's name"
    )


def _absorb(program: Program, idle: Iterable[int], taken: dict[int, str]) -> None:
    """Add operations such as masks, which the backward pass alone needs and no gradient goes into, to the segment that
    makes all their inputs.
    """
    for index in sorted(idle):
        action = program.actions[index]
        makers = [maker for value in action.reads for maker in program.producers[value]]
        names = {taken.get(maker, "") for maker in makers}
        if len(names) == 1 and "" not in names and not action.effect:
            taken[index] = names.pop()
