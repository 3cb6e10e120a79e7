"""The loop that runs backward: what a step of it computes, and what it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from foreplan.base.errors import UnsupportedError
from foreplan.graph import Builder, Graph, GraphBuilder, Kind, Node, Value
from foreplan.graph.ir import live_nodes
from foreplan.graph.op import Cotangents, Values
from foreplan.ops.map import elementwise
from foreplan.ops.pullback import pulled_back
from foreplan.ops.shape import reshape, slice_axis
from foreplan.ops.unstack import zeros


class Looping(Protocol):
    """What is needed of `foreplan.ops.loop.Loop`; see there."""

    @property
    def carries(self) -> int:
        """Their number."""

    @property
    def slices(self) -> int:
        """Their number."""

    @property
    def kept(self) -> int:
        """How many stacks are there for backward."""

    @property
    def graph(self) -> Graph:
        """The body."""

    @property
    def results(self) -> tuple[Value, ...]:
        """The outputs of the body."""


@dataclass(frozen=True)
class _Step:
    """A step of backward: a graph, and what its inputs and outputs are, as numbers in their order.

    Attributes:
        graph: the body. Its inputs are `flows`, `sums`, `given`, `moved`, `befores`, `afters`, `kept`, `slices`,
            `fixed`, `constants`; its outputs are the next ones of the first two, and `slice_flows`.
        flows: carries whose cotangents are carried.
        sums: inputs of the loop that every step reads, whose cotangents are added up.
        given: stacked results of the loop whose cotangents it reads.
        moved: carries whose histories have cotangents, which it reads.
        befores, afters: carries that it reads as the forward step found them, and as it left them.
        kept: kept values that it reads.
        slices: slices that it reads.
        fixed: what it reads of what every step reads.
        constants: contents that it needs beside these.
        slice_flows: slices whose cotangents it gives.
    """

    graph: Graph
    flows: tuple[int, ...]
    sums: tuple[int, ...]
    given: tuple[int, ...]
    moved: tuple[int, ...]
    befores: tuple[int, ...]
    afters: tuple[int, ...]
    kept: tuple[int, ...]
    slices: tuple[int, ...]
    fixed: tuple[int, ...]
    constants: tuple[Value, ...]
    slice_flows: tuple[int, ...]


def gradient(b: Builder, loop: Any, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
    """The cotangents of a loop's inputs.

    Args:
        outputs: of a loop that keeps what backward reads.
        cotangents: of the outputs; of what is kept and of histories too, where a gradient is differentiated once more.
    """
    wanted = [value.dtype.is_float and b.wants(value) for value in inputs]
    first, end = loop.carries + loop.slices, len(loop.results)
    histories = dict(zip(loop.histories, outputs[end:]))
    moved = {i: flow for i, flow in zip(loop.histories, cotangents[end:]) if flow is not None}
    step = _step(loop, [flow is not None for flow in cotangents[loop.carries : end]], wanted, tuple(moved))
    if not histories.keys() >= {*step.befores, *step.afters}:
        raise UnsupportedError("a loop whose gradient is differentiated reads a carry that was not kept")
    carried = [cotangents[i] or _zero(b, inputs[i]) for i in step.flows] + [_zero(b, inputs[i]) for i in step.sums]
    stacks = [flow for i in step.given if (flow := cotangents[loop.carries + i]) is not None]
    stacks += [loop.slices_of(b, moved[i], after=True) for i in step.moved]
    stacks += [loop.slices_of(b, histories[i], after=False) for i in step.befores]
    stacks += [loop.slices_of(b, histories[i], after=True) for i in step.afters]
    stacks += [outputs[end - loop.kept + i] for i in step.kept] + [inputs[loop.carries + i] for i in step.slices]
    fixed = [inputs[first + i] for i in step.fixed]
    fixed += [b.store(c.name, c.type, Kind.CONSTANT, c.init) for c in step.constants if c.init is not None]
    backward = replace(
        loop,
        body=step.graph.as_text(),
        carries=len(carried),
        slices=len(stacks),
        reverse=not loop.reverse,
        kept=-1,
        histories=(),
    )
    made = b.node(backward, *carried, *stacks, *fixed)
    found = dict(zip((*step.flows, *step.sums), made))
    found |= zip((loop.carries + i for i in step.slice_flows), made[len(carried) :])
    for i, flow in moved.items():
        begin = slice_axis(b, flow, 0, loop.steps if loop.reverse else 0, 1)
        found[i] = elementwise(b, lambda x, y: x + y, found[i], reshape(b, begin, inputs[i].shape), name="sum")
    return [found.get(i) if wanted[i] else None for i in range(len(inputs))]


def read_by_backward(loop: Looping) -> tuple[list[Value], tuple[int, ...]]:
    """What backward reads, if all gradients are asked for: values that the loop keeps, and carries by number."""
    last = len(loop.results) - loop.kept
    flows = [i < last and value.dtype.is_float for i, value in enumerate(loop.results)][loop.carries :]
    step = _step(loop, flows, [value.dtype.is_float for value in loop.graph.inputs], ())
    return [loop.results[last + i] for i in step.kept], tuple(sorted({*step.befores, *step.afters}))


def _step(loop: Looping, flows: Sequence[bool], wanted: Sequence[bool], moved: Sequence[int]) -> _Step:
    """One step of backward.

    Args:
        flows: of each stacked result, whether it has a cotangent.
        wanted: of each input, whether its cotangent is asked for.
        moved: the carries whose histories have a cotangent.
    """
    body, b = loop.graph, GraphBuilder("backward")
    b.kind = Kind.GRADIENT
    first, last = loop.carries + loop.slices, len(loop.results) - loop.kept
    moving = [i for i, value in enumerate(body.inputs[: loop.carries]) if value.dtype.is_float]
    flow = {i: b.input(f"flow{i}", body.inputs[i].type) for i in moving}
    given = {i: b.input(f"given{i}", loop.results[loop.carries + i].type) for i, each in enumerate(flows) if each}
    shift = {i: b.input(f"moved{i}", body.inputs[i].type) for i in moved}
    at = {value: b.input(value.name, value.type) for value in dict.fromkeys((*loop.results[last:], *body.inputs))}
    after: dict[int, Value] = {}
    for i, value in enumerate(loop.results[: loop.carries]):
        if value not in at:
            after[i] = at[value] = b.input(f"after{i}", value.type)
    nodes = _repeated(b, body, at)
    ends = [(at[loop.results[i]], flow[i]) for i in moving] + [(at[loop.results[i]], shift[i]) for i in moved]
    ends += [(at[loop.results[loop.carries + i]], each) for i, each in given.items()]
    asked = [*moving, *(i for i in range(loop.carries, len(wanted)) if wanted[i])]
    found = dict(zip(asked, pulled_back(b, nodes, ends, [at[body.inputs[i]] for i in asked])))
    outputs = {f"flow{i}": found[i] or _zero(b, body.inputs[i]) for i in moving}
    sums: dict[int, Value] = {}
    for i in asked:
        if i >= first and (more := found[i]) is not None:
            sums[i] = b.input(f"sum{i}", more.type)
            outputs[f"sum{i}"] = elementwise(b, lambda x, y: x + y, sums[i], more, name="sum")
    slice_flows = {i: each for i in asked if loop.carries <= i < first and (each := found[i]) is not None}
    outputs |= {f"slice{i}": value for i, value in slice_flows.items()}
    graph = Graph(b.name, (), tuple(b.stored), tuple(b.nodes), outputs)
    graph = replace(graph, nodes=live_nodes(graph, graph.results))
    read = {value for node in graph.nodes for value in node.inputs} | set(graph.results)

    def numbers(values: Iterable[Value]) -> list[int]:
        return [i for i, value in enumerate(values) if at[value] in read]

    befores, kept = numbers(body.inputs[: loop.carries]), numbers(loop.results[last:])
    afters = [i for i, value in after.items() if value in read]
    slices, fixed = numbers(body.inputs[loop.carries : first]), numbers(body.inputs[first:])
    constants = tuple(value for value in b.stored if value in read)
    inputs = [*flow.values(), *sums.values(), *given.values(), *shift.values()]
    inputs += [at[body.inputs[i]] for i in befores] + [after[i] for i in afters]
    inputs += [at[loop.results[last + i]] for i in kept] + [at[body.inputs[loop.carries + i]] for i in slices]
    inputs += [at[body.inputs[first + i]] for i in fixed]
    return _Step(
        _only_inputs(graph, inputs, constants),
        flows=tuple(moving),
        sums=tuple(sums),
        given=tuple(given),
        moved=tuple(moved),
        befores=tuple(befores),
        afters=tuple(afters),
        kept=tuple(kept),
        slices=tuple(slices),
        fixed=tuple(fixed),
        constants=constants,
        slice_flows=tuple(i - loop.carries for i in slice_flows),
    )


def _zero(b: Builder, like: Value) -> Value:
    return zeros(b, like.dtype, like.shape)


def _repeated(b: Builder, body: Graph, at: dict[Value, Value]) -> list[Node]:
    """The nodes of a step once more; those whose results were kept only as something to differentiate."""
    nodes = []
    for node in body.nodes:
        inputs = tuple(at[value] for value in node.inputs)
        if all(value in at for value in node.outputs):
            nodes.append(Node(node.op, inputs, tuple(at[value] for value in node.outputs), node.name))
        else:
            at.update(zip(node.outputs, b.repeat(node, inputs)))
            nodes.append(b.nodes[-1])
    return nodes


def _only_inputs(graph: Graph, inputs: Sequence[Value], constants: Iterable[Value]) -> Graph:
    """The graph with these inputs, and its constants as further ones."""
    now: Mapping[Value, Value] = {value: replace(value, kind=Kind.INPUT, init=None) for value in constants}

    def new(value: Value) -> Value:
        return now.get(value, value)

    return replace(
        graph,
        inputs=(*inputs, *now.values()),
        stored=(),
        nodes=tuple(replace(node, inputs=tuple(map(new, node.inputs))) for node in graph.nodes),
        outputs={name: new(value) for name, value in graph.outputs.items()},
    )
