"""What a graph keeps alive as its nodes are listed: an estimate before anything is planned."""

from __future__ import annotations

from foreplan.graph import Graph, Node, Value
from foreplan.graph.value import Kind
from foreplan.ops.join import Concat


def live_bytes(graph: Graph) -> list[int]:
    """Bytes of inputs and activations that are alive while each node runs.

    Views share what they look at, and results take the bytes of what dies, where the ops say that they may. What a
    concatenation joins lies within it from the start, where it can.
    """
    storage = _storage(graph)
    count = len(graph.nodes)
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    sizes: dict[Value, int] = {}
    for value, at in [*((x, 0) for x in graph.inputs), *((x, i) for i, n in enumerate(graph.nodes) for x in n.outputs)]:
        root = storage[value]
        first[root] = min(first.get(root, at), at)
        sizes[root] = max(sizes.get(root, 0), value.type.nbytes)
    for at, node in enumerate(graph.nodes):
        last.update((storage[value], at) for value in (*node.inputs, *node.outputs) if value in storage)
    last.update((storage[value], count - 1) for value in graph.returned if value in storage)
    change = [0] * (count + 1)
    for root, begin in first.items():
        change[begin] += sizes[root]
        change[last.get(root, begin) + 1] -= sizes[root]
    for at, node in enumerate(graph.nodes):
        change[at] -= (shared := _in_place(node, at, storage, first, last, sizes))
        change[at + 1] += shared
    live, total = [], 0
    for step in change[:count]:
        total += step
        live.append(total)
    return live


def _storage(graph: Graph) -> dict[Value, Value]:
    """By value that is not stored, the one whose bytes it has."""
    inside: dict[Value, Value] = {}
    for join in graph.nodes_of(Concat):
        parts = join.op.parts([x.type for x in join.inputs], [join.outputs[0].type])
        free = {value for value in join.inputs if join.inputs.count(value) == 1 and graph.readers[value] == (join,)}
        inside.update((join.inputs[i], join.outputs[0]) for _, i, _ in parts if join.inputs[i] in free)
    found: dict[Value, Value] = {value: value for value in graph.inputs}
    for node in reversed(graph.nodes):  # a whole before its parts
        for value in node.outputs:
            whole = inside.get(value)
            found[value] = value if whole is None else found[whole]
    for node in graph.nodes:
        if node.op.is_view and node.inputs[0].kind in (Kind.ACTIVATION, Kind.INPUT) and node.inputs[0] in found:
            found[node.outputs[0]] = found[node.inputs[0]]
    return found


def _in_place(
    node: Node,
    at: int,
    storage: dict[Value, Value],
    first: dict[Value, int],
    last: dict[Value, int],
    sizes: dict[Value, int],
) -> int:
    """Bytes of results that lie where inputs die."""
    if node.op.is_view:
        return 0
    shared, taken = 0, set[Value]()
    for output, read in node.op.overwrites([x.type for x in node.inputs], [x.type for x in node.outputs]):
        old, new = storage.get(node.inputs[read]), storage[node.outputs[output]]
        begins = first[new] == at and new not in taken
        if old is not None and old not in taken and begins and last[old] == at and sizes[old] >= sizes[new]:
            taken.update((old, new))
            shared += sizes[new]
    return shared
