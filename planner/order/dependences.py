"""Which actions run, and which must run before which: the rules that every order obeys."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.base.errors import PlanError
from foreplan.planner.problem import Problem, Role


@dataclass(frozen=True)
class Dependences:
    """The chosen actions as a directed acyclic graph; nodes are positions in `actions`.

    Attributes:
        actions: indices into the problem's actions, ascending, each once.
        before: for each node, the nodes that must run before it (one may be listed twice).
        after: for each node, the nodes that must run after it (likewise).
    """

    actions: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


def dependences(problem: Problem) -> Dependences:
    """Choose the actions that run, once each, and derive their partial order.

    An action runs after the writers of its reads. An action that takes the bytes of another value, by a required
    overwrite or by writing the next content of a stored value (`home`), runs after every other reader of the old
    content.

    Raises:
        PlanError: no order can exist; names the actions and values that contradict each other.
    """
    actions = _choose(problem)
    writer = [-1] * len(problem.values)
    readers: list[list[int]] = [[] for _ in problem.values]
    for node, index in enumerate(actions):
        action = problem.actions[index]
        for value in action.writes:
            if writer[value] < 0:
                writer[value] = node
        for value in action.reads:
            readers[value].append(node)
    before: list[list[int]] = []
    for index in actions:
        before.append([writer[value] for value in problem.actions[index].reads if writer[value] >= 0])
    for value, node in _overwriters(problem, actions).items():
        before[node] += [reader for reader in readers[value] if reader != node]
    after: list[list[int]] = [[] for _ in actions]
    for node, nodes in enumerate(before):
        for earlier in nodes:
            after[earlier].append(node)
    return Dependences(tuple(actions), tuple(map(tuple, before)), tuple(map(tuple, after)))


def _choose(problem: Problem) -> list[int]:
    """Only actions with an effect, and the first listed producer of every other value that is needed."""
    chosen = {index for index, action in enumerate(problem.actions) if action.effect}
    there = [value.role in (Role.INPUT, Role.STORED) for value in problem.values]
    needed = [v for v, value in enumerate(problem.values) if value.role is Role.OUTPUT]
    for index in sorted(chosen):
        needed += problem.actions[index].reads
        for value in problem.actions[index].writes:
            there[value] = True
    while needed:
        value = needed.pop()
        if there[value]:
            continue
        if not problem.producers[value]:
            raise PlanError(f"value {problem.values[value].name!r} is needed, and no action writes it")
        index = problem.producers[value][0]
        chosen.add(index)
        needed += problem.actions[index].reads
        for written in problem.actions[index].writes:
            there[written] = True
    return sorted(chosen)


def _overwriters(problem: Problem, actions: list[int]) -> dict[int, int]:
    """By value, the node that takes its bytes and so must be the last of its readers."""
    taken: dict[int, int] = {}
    for node, index in enumerate(actions):
        action = problem.actions[index]
        pairs = [(action.reads[pair.read], action.writes[pair.write]) for pair in action.overwrites if pair.required]
        allowed = {(action.reads[pair.read], action.writes[pair.write]) for pair in action.overwrites}
        for write in action.writes:
            home = problem.values[write].home
            if home < 0:
                continue
            if home in action.reads and (home, write) not in allowed:
                raise PlanError(
                    f"action {action.name!r} writes {problem.values[write].name!r} into the bytes of "
                    f"{problem.values[home].name!r}, which it reads and may not overwrite; let it write a temporary"
                )
            pairs.append((home, write))
        for old, new in dict.fromkeys(pairs):
            _check_pair(problem, action.name, old, new)
            if taken.setdefault(old, node) != node:
                other = problem.actions[actions[taken[old]]].name
                raise PlanError(
                    f"actions {other!r} and {action.name!r} both must take the bytes of {problem.values[old].name!r}"
                )
    return taken


def _check_pair(problem: Problem, name: str, old: int, new: int) -> None:
    before, after = problem.values[old], problem.values[new]
    if before.role is Role.OUTPUT:
        raise PlanError(f"action {name!r} must overwrite {before.name!r}, which must be there when the step ends")
    if (before.role is Role.STORED or after.home >= 0) and after.home != old:
        raise PlanError(
            f"action {name!r} must write {after.name!r} over {before.name!r}, but the bytes of a stored value are "
            "for the value with that home only"
        )


def name_cycle(problem: Problem, graph: Dependences, stuck: list[int]) -> PlanError:
    """The error for nodes of which each must run before another one of them."""
    left = set(stuck)
    node = stuck[0]
    path: list[int] = []
    seen: dict[int, int] = {}
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = next(earlier for earlier in graph.before[node] if earlier in left)
    names = [problem.actions[graph.actions[i]].name for i in reversed(path[seen[node] :])]
    return PlanError(
        f"no order can run these actions: each must precede the next, and the last must precede the first: {names}; "
        "an action that overwrites a value must follow every reader of it"
    )
