"""Orders of the actions: named heuristics, each a function from the dependence graph to a topological order.

Which one is best depends on the program, so the driver tries them all and keeps the lowest arena. All are
deterministic: ties go to the action listed first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from foreplan.planner.memory.arrays import problem_arrays, stay
from foreplan.planner.order.arrays import hills
from foreplan.planner.order.dependences import Dependences, name_cycle
from foreplan.planner.problem import Problem

_NEVER = 1 << 62  # above any number of bytes

Heuristic = Callable[[Problem, Dependences], list[int]]


def program_order(problem: Problem, graph: Dependences) -> list[int]:
    """The listed order; where that would overwrite a value before its last read, the nearest order that does not.

    Kahn, "Topological sorting of large networks", CACM 1962, with the lowest index first.
    """
    return _by_priority(problem, graph, [0] * len(graph.actions))


def updates_first(problem: Problem, graph: Dependences) -> list[int]:
    """Program order, but every update runs as soon as it may: after the last reader of what it overwrites.

    So a gradient dies right after it is made. Lv et al. fuse the optimizer into the backward pass like this: "Full
    Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), arXiv 2306.09782.
    """
    return _by_priority(problem, graph, [0 if update else 1 for update in _updates(problem, graph)])


def frees_first(problem: Problem, graph: Dependences) -> list[int]:
    """Program order, but an action after which no more bytes live than before runs at once.

    Of several such actions, the one that needs the fewest bytes while it runs goes first, then the one that frees the
    most. In Liu's terms: segments that end lower than they begin, by ascending hill ("An application of generalized
    tree pebbling to sparse matrix factorization", SIAM J. Algebraic Discrete Methods 1987). So weight gradients come
    before data gradients, since their layer's input is dead after them.
    """
    return _by_freed_bytes(problem, graph, only_free=True)


def least_memory_first(problem: Problem, graph: Dependences) -> list[int]:
    """Of the ready actions always the one after which the fewest bytes live.

    This greedy list scheduling is known as least peak memory first. It makes locally the trade-off of Sethi and
    Ullman, "The generation of optimal code for arithmetic expressions", JACM 1970, and, for graphs, of Kayaaslan et
    al., "Scheduling series-parallel task graphs to minimize peak memory", Theoretical Computer Science 2018.
    """
    return _by_freed_bytes(problem, graph, only_free=False)


def depth_first(problem: Problem, graph: Dependences) -> list[int]:
    """Each action as late as possible: depth first from the final actions, the largest operand first.

    A depth-first traversal against the edges, finished nodes first (Tarjan, "Depth-first search and linear graph
    algorithms", SIAM J. Computing 1972); larger subtrees first is the rule of Sethi and Ullman (JACM 1970), with the
    operand's bytes in place of its register need.
    """
    weight = [sum(problem.values[v].nbytes for v in problem.actions[index].writes) for index in graph.actions]
    done = [False] * len(graph.actions)
    order: list[int] = []
    for sink, after in enumerate(graph.after):
        if after:
            continue
        stack = [(sink, False)]
        while stack:
            node, expanded = stack.pop()
            if expanded:
                order.append(graph.actions[node])
            elif not done[node]:
                done[node] = True
                stack.append((node, True))
                earlier = {i for i in graph.before[node] if not done[i]}
                stack += [(i, False) for i in sorted(earlier, key=lambda i: (weight[i], -i))]
    return order


def updates_last(problem: Problem, graph: Dependences, order: Sequence[int]) -> list[int]:
    """An order with its updates at the end, like an optimizer that runs after the whole backward pass."""
    place = {action: step for step, action in enumerate(order)}
    late = [len(order) if update else 0 for update in _updates(problem, graph)]
    return _by_priority(problem, graph, [place[action] + more for action, more in zip(graph.actions, late)])


HEURISTICS: dict[str, Heuristic] = {
    "program order": program_order,
    "updates first": updates_first,
    "frees first": frees_first,
    "least memory first": least_memory_first,
    "depth first": depth_first,
}


def _updates(problem: Problem, graph: Dependences) -> list[bool]:
    """Whether each node has an effect or writes a stored value's next content."""
    actions = [problem.actions[index] for index in graph.actions]
    return [a.effect or any(problem.values[v].home >= 0 for v in a.writes) for a in actions]


def _by_priority(problem: Problem, graph: Dependences, priority: list[int]) -> list[int]:
    waiting = [len(before) for before in graph.before]
    ready = [(priority[node], node) for node, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(graph.actions[node])
        for later in graph.after[node]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, (priority[later], later))
    if len(order) < len(graph.actions):
        raise name_cycle(problem, graph, [node for node, count in enumerate(waiting) if count > 0])
    return order


def _by_freed_bytes(problem: Problem, graph: Dependences, *, only_free: bool) -> list[int]:
    """List scheduling by the bytes that live after a node less those before it.

    A write that only updates read, such as a weight gradient, counts as nothing: the updates can follow at once and
    free it. A node's figure falls when it becomes the last reader of a value. The node is then pushed again, and its
    old entry is skipped. Each read pushes at most one entry, so the whole is O((n + reads) log n).
    """
    p = problem_arrays(problem)
    size, stays, updates = p.size.tolist(), stay(p).tolist(), _updates(problem, graph)
    actions = [problem.actions[index] for index in graph.actions]
    reads = [[v for v in action.reads if not stays[v]] for action in actions]
    readers: list[list[int]] = [[] for _ in size]
    for node, values in enumerate(reads):
        for v in values:
            readers[v].append(node)
    left, last = [len(nodes) for nodes in readers], [sum(nodes) for nodes in readers]  # of those that have not run
    kept = [stays[v] or not all(updates[node] for node in nodes) for v, nodes in enumerate(readers)]
    net = [
        sum(size[v] for v in action.writes if kept[v]) - sum(size[v] for v in values if left[v] == 1)
        for action, values in zip(actions, reads)
    ]
    hill = hills(p, graph)
    waiting = [len(before) for before in graph.before]

    def entry(node: int) -> tuple[int, int, int]:
        if only_free:
            return (hill[node], net[node], node) if net[node] <= 0 else (_NEVER, 0, node)
        return (net[node], hill[node], node)

    ready = [entry(node) for node, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    done = [False] * len(waiting)
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        if done[node]:
            continue
        done[node] = True
        order.append(graph.actions[node])
        for v in reads[node]:
            left[v] -= 1
            last[v] -= node
            if left[v] == 1:
                net[last[v]] -= size[v]
                if waiting[last[v]] == 0:
                    heapq.heappush(ready, entry(last[v]))
        for later in graph.after[node]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, entry(later))
    return order
