"""Sums that a loop adds up step by step → one sum over all steps, behind the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Fill, Graph, Kind, Node, Op, Value
from foreplan.ops.join import Concat
from foreplan.ops.loop import Loop
from foreplan.ops.map import Map, elementwise
from foreplan.ops.reduce import Reduce, reduce
from foreplan.ops.shape import Broadcast, Reshape, Slice, reshape, slice_axis
from foreplan.passes.base import Pass
from foreplan.passes.narrowing import axes_of, sums_of
from foreplan.passes.rewrite import rewrite_ops

Make = Callable[[], Value]  # adds the nodes that compute a value behind the loop


@dataclass(frozen=True)
class HoistSums(Pass, requires=("plain ops",), ensures=("plain ops",), optional=True):
    """The graph with carries that loops only add to computed behind them, from what all steps give or read.

    The gradients of what every step reads are such sums. That of a weight is a product in each step, whose depth is the
    batch; behind the loop it is one product, whose depth is the batch times the steps. So it is with every op that adds
    up along the first axis of all that it reads, as its axes say: a convolution's weights, rows of a table. The
    gradient of a bias is one reduction.

    Only where it costs no memory: the factors of all steps lie in stacks and histories in any case, and no result of
    the loop may take their place; or they take the place of slices that are not read again. `trim_loops` then takes the
    carries out of the loops.

    Ensures: the same results, up to the order of summation.
    """

    def _run(self, graph: Graph) -> Graph:
        position = {node: i for i, node in enumerate(graph.nodes)}

        def behind(b: Builder, node: Node[Loop], inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            if not _added(node.op):
                return None
            outputs: list[Value] = []
            dying = [not _is_kept(graph, position, node, i) for i in range(len(inputs))]
            op, stacks = node.op, _stacks(b, node.op, inputs, outputs, dying)
            totals = _totals(b, op, stacks)
            wider = _with_factors(op, stacks, dying)
            if wider is not op:
                more = _totals(b, wider, _stacks(b, wider, inputs, outputs, dying))
                op, totals = (wider, more) if len(more) > len(totals) else (op, totals)
            if not totals:
                return None
            outputs[:] = found = b.node(op, *inputs, name=node.name)
            b.scope = f"{node.name}/"
            summed = {i: make() for i, make in totals.items()}
            for i, total in summed.items():
                if not _is_zero(graph, node.inputs[i]):
                    summed[i] = elementwise(b, lambda x, y: x + y, inputs[i], total, name="sum")
            as_before = found[: len(node.op.results)] + found[len(op.results) :]
            return [summed.get(i, value) for i, value in enumerate(as_before)]

        return rewrite_ops(graph, behind, Loop) if graph.nodes_of(Loop) else graph


hoist_sums = HoistSums()


def _is_kept(graph: Graph, position: dict[Node, int], node: Node, index: int) -> bool:
    """Whether nothing may take the place of an input of a loop: it is read later, or is a part of something, such as of
    a history.
    """
    value = node.inputs[index]
    later = any(position[reader] > position[node] for reader in graph.readers[value])
    return value.kind.is_stored or later or value in graph.returned or _is_part(graph, value)


def _is_part(graph: Graph, value: Value) -> bool:
    """Whether a value is a view of some bytes of a larger one."""
    node = graph.producer.get(value)
    if node is None or not node.op.is_view:
        return False
    return node.inputs[0].type.nbytes > value.type.nbytes or _is_part(graph, node.inputs[0])


def _added(op: Loop) -> dict[int, Value]:
    """By the number of each carry that a step only adds something to: what it adds."""
    body, found = op.graph, {}
    for i, (carry, after) in enumerate(zip(body.inputs[: op.carries], op.results)):
        node = body.made_by(after, Map)
        if node is None or not node.op.is_sum:
            continue
        others = [value for value in node.inputs if value is not carry]
        alone = body.readers[carry] == (node,) and not body.readers[after] and op.results.count(after) == 1
        same = [value.type for value in node.inputs] == [carry.type] * 2 and not carry.dtype.is_narrow
        if len(others) == 1 and alone and same and i not in op.histories:
            found[i] = others[0]
    return found


def _with_factors(op: Loop, stacks: Collection[Value], dying: Sequence[bool]) -> Loop:
    """The loop that also gives the factors of the products that it adds up, where each can take the place of a slice
    that no stack takes yet.
    """
    body = op.graph
    free = Counter(body.inputs[i].type.nbytes for i in range(op.carries, op.carries + op.slices) if dying[i])
    free.subtract(value.type.nbytes for value in op.results[op.carries :])
    more: list[Value] = []
    for value in _added(op).values():
        node = body.producer.get(value)
        if node is None or op.kept > 0 or not _adds_up(node, op.steps):
            continue
        missing = [x for x in dict.fromkeys(node.inputs) if x not in stacks and x not in more]
        taken = Counter(x.type.nbytes for x in missing)
        if all(count <= free[nbytes] for nbytes, count in taken.items()):
            free.subtract(taken)
            more += missing
    if not more:
        return op
    outputs = {**body.outputs, **{f"factor{i}": value for i, value in enumerate(more)}}
    return replace(op, body=replace(body, outputs=outputs).as_text())


def _stacks(
    b: Builder, op: Loop, inputs: Sequence[Value], outputs: Sequence[Value], dying: Sequence[bool]
) -> dict[Value, Make]:
    """By value of the body: the stack [steps, …] of what it is in all steps, if there is one in any case.

    Args:
        outputs: of the loop, read when a stack is made.
        dying: for each input, whether a stack of its size may take its place.
    """
    body, last = op.graph, len(op.results)
    found: dict[Value, Make] = {}
    sizes = {value.type.nbytes for value in op.results[op.carries :]}
    for i in range(op.carries, op.carries + op.slices):
        if not dying[i] or body.inputs[i].type.nbytes not in sizes:
            found[body.inputs[i]] = partial(inputs.__getitem__, i)
    for i in range(op.carries, last):
        found.setdefault(op.results[i], partial(outputs.__getitem__, i))
    for place, i in enumerate(op.histories, last):
        found.setdefault(body.inputs[i], partial(_history, b, op, outputs, place, False))
        found.setdefault(op.results[i], partial(_history, b, op, outputs, place, True))
    for join in reversed(body.nodes_of(Concat)):
        if whole := found.get(join.outputs[0]):
            start, axis = 0, join.op.axis
            for value in join.inputs:
                found.setdefault(value, partial(_part, b, whole, axis + 1, start, value.shape[axis]))
                start += value.shape[axis]
    for view in body.nodes_of(Reshape, Slice):
        if (whole := found.get(view.inputs[0])) is not None:
            if cut := view.of(Slice):
                found.setdefault(cut.outputs[0], partial(_sliced, b, whole, cut.op))
            else:
                found.setdefault(view.outputs[0], partial(_reshaped, b, whole, (op.steps, *view.outputs[0].shape)))
    return found


def _history(b: Builder, op: Loop, outputs: Sequence[Value], place: int, after: bool) -> Value:
    return op.slices_of(b, outputs[place], after=after)


def _part(b: Builder, whole: Make, axis: int, start: int, count: int) -> Value:
    return slice_axis(b, whole(), axis, start, count)


def _reshaped(b: Builder, whole: Make, shape: Sequence[int]) -> Value:
    return reshape(b, whole(), shape)


def _sliced(b: Builder, whole: Make, op: Slice) -> Value:
    stack = whole()
    return b.apply(Slice((0, *op.starts), (stack.shape[0], *op.shape), (1, *op.steps)), stack)


def _totals(b: Builder, op: Loop, stacks: Mapping[Value, Make]) -> dict[int, Make]:
    """By number of a carry that can be computed behind the loop: what is added to it in all steps."""
    found = {i: _total(b, op, stacks, value) for i, value in _added(op).items()}
    return {i: make for i, make in found.items() if make is not None}


def _total(b: Builder, op: Loop, stacks: Mapping[Value, Make], value: Value) -> Make | None:
    """What a value of a body adds up to over all steps; None if it takes more than there are stacks of."""
    if turned := op.graph.made_by(value, Reshape):
        inner = _total(b, op, stacks, turned.inputs[0])
        return inner and partial(_reshaped, b, inner, value.shape)
    node = op.graph.producer.get(value)
    if node is not None and all(x in stacks for x in node.inputs):
        if (total := node.of(Reduce)) and total.op.how == "sum" and len(value.shape) <= 2:
            return partial(_sum, b, stacks[total.inputs[0]], total.op.axes, value)
        if _adds_up(node, op.steps):
            return partial(_once, b, node.op, [stacks[x] for x in node.inputs])
    return partial(_sum, b, stacks[value], (), value) if value in stacks else None


def _adds_up(node: Node, steps: int) -> bool:
    """Whether what a node gives in all steps adds up to what its op gives of all steps at once, the steps and the first
    axis of each input being one.
    """
    if len(node.outputs) > 1 or not node.inputs or any(not x.shape for x in node.inputs) or steps < 2:
        return False
    types = [x.type.with_shape((steps * x.shape[0], *x.shape[1:])) for x in node.inputs]
    try:
        if node.op.result_types(types) != tuple(value.type for value in node.outputs):
            return False
    except ShapeError:
        return False
    at_once = replace(node, inputs=tuple(replace(x, type=type) for x, type in zip(node.inputs, types)))
    if (axes := axes_of(at_once)) is None:
        return False
    first = axes.inputs[0][0]
    name = first.terms[0][0] if len(first.terms) == 1 and first.dense else ""
    elsewhere = any(name in dict(dim.terms) for dims in axes.inputs for dim in dims[1:])
    _, how = sums_of(at_once).get(name, (0, ""))
    return how == "sum" and not elsewhere and all(dims[0] == first for dims in axes.inputs)


def _once(b: Builder, op: Op, stacks: Sequence[Make]) -> Value:
    """Σ_t op(x[t], y[t], …), as one: the steps and the first axes of what the op reads are one axis."""
    whole = [stack() for stack in stacks]
    return b.apply(op, *(reshape(b, x, (x.shape[0] * x.shape[1], *x.shape[2:])) for x in whole))


def _sum(b: Builder, stack: Make, axes: Sequence[int], like: Value) -> Value:
    total = reduce(b, "sum", stack(), (0, *(axis + 1 for axis in axes)))
    return reshape(b, total, like.shape)


def _is_zero(graph: Graph, value: Value) -> bool:
    """Whether a value is a constant zero, perhaps repeated."""
    if repeated := graph.made_by(value, Broadcast):
        value = repeated.inputs[0]
    return value.kind is Kind.CONSTANT and value.init == Fill(0.0)
