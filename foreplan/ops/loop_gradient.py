"""The loop that runs backward: what a step of it computes, and what it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from foreplan.graph import Builder, Graph, Kind, Node, Value
from foreplan.graph.op import Cotangents, Values
from foreplan.graph.text import print_graph
from foreplan.graph.walk import live_nodes
from foreplan.ops.map import elementwise
from foreplan.ops.pullback import pulled_back
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
        """How many outputs are there for backward."""

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
        graph: the body. Its inputs are `flows`, `sums`, `afters`, `given`, `kept`, `slices`, `fixed`, `constants`; its
            outputs are the next ones of the first three, and `slice_flows`.
        flows: carries whose cotangents are carried.
        sums: inputs of the loop that every step reads, whose cotangents are added up.
        afters: carries that the step finds as the forward step left them: what the step before it began with.
        given: stacked results of the loop whose cotangents it reads.
        kept: kept values that it reads.
        slices: slices that it reads.
        fixed: what it reads of what every step reads.
        constants: contents that it needs beside these.
        slice_flows: slices whose cotangents it gives.
    """

    graph: Graph
    flows: tuple[int, ...]
    sums: tuple[int, ...]
    afters: tuple[int, ...]
    given: tuple[int, ...]
    kept: tuple[int, ...]
    slices: tuple[int, ...]
    fixed: tuple[int, ...]
    constants: tuple[Value, ...]
    slice_flows: tuple[int, ...]


def gradient(b: Builder, loop: Any, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
    """The cotangents of a loop's inputs.

    Args:
        outputs: of a loop that keeps what backward reads.
        cotangents: of the outputs; of kept ones too, where a gradient is differentiated once more.
    """
    wanted = [value.dtype.is_float and b.wants(value) for value in inputs]
    first, last = loop.carries + loop.slices, len(outputs) - loop.kept
    step = _step(loop, [flow is not None for flow in cotangents[loop.carries :]], wanted)

    def zero(like: Value) -> Value:
        return zeros(b, like.dtype, like.shape)

    carried = [cotangents[i] or zero(inputs[i]) for i in step.flows] + [zero(inputs[i]) for i in step.sums]
    carried += [outputs[i] for i in step.afters]
    stacks = [flow for i in step.given if (flow := cotangents[loop.carries + i]) is not None]
    stacks += [*(outputs[last + i] for i in step.kept), *(inputs[loop.carries + i] for i in step.slices)]
    fixed = [inputs[first + i] for i in step.fixed]
    fixed += [b.store(c.name, c.type, Kind.CONSTANT, c.init) for c in step.constants if c.init is not None]
    counts = {"carries": len(carried), "slices": len(stacks)}
    made = b.node(
        replace(loop, body=print_graph(step.graph), reverse=not loop.reverse, kept=-1, **counts),
        *carried,
        *stacks,
        *fixed,
    )
    found = dict(zip((*step.flows, *step.sums), made))
    found |= zip((loop.carries + i for i in step.slice_flows), made[len(carried) :])
    return [found.get(i) if wanted[i] else None for i in range(len(inputs))]


def read_by_backward(loop: Looping) -> list[Value]:
    """The values of the body that backward reads of those that the loop keeps, if all gradients are asked for."""
    last = len(loop.results) - loop.kept
    flows = [i < last and value.dtype.is_float for i, value in enumerate(loop.results)][loop.carries :]
    step = _step(loop, flows, [value.dtype.is_float for value in loop.graph.inputs])
    return [loop.results[last + i] for i in step.kept]


def _step(loop: Looping, flows: Sequence[bool], wanted: Sequence[bool]) -> _Step:
    """One step of backward.

    Args:
        flows: of each stacked result, whether it has a cotangent.
        wanted: of each input, whether its cotangent is asked for.
    """
    body, b = loop.graph, Builder("backward")
    b.kind = Kind.GRADIENT
    first, last = loop.carries + loop.slices, len(loop.results) - loop.kept
    moving = [i for i, value in enumerate(body.inputs[: loop.carries]) if value.dtype.is_float]
    flow = {i: b.input(f"flow{i}", body.inputs[i].type) for i in moving}
    given = {i: b.input(f"given{i}", loop.results[loop.carries + i].type) for i, each in enumerate(flows) if each}
    at = {value: b.input(value.name, value.type) for value in dict.fromkeys((*loop.results[last:], *body.inputs))}
    after = {
        i: at.setdefault(value, b.input(f"after{i}", value.type))
        for i, value in enumerate(loop.results[: loop.carries])
        if value not in at
    }
    nodes = _repeated(b, body, at)
    ends = [(at[loop.results[i]], flow[i]) for i in moving]
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
    graph = Graph(
        b.name, (), tuple(b.stored), tuple(b.nodes), outputs | {f"slice{i}": v for i, v in slice_flows.items()}
    )
    graph = replace(graph, nodes=live_nodes(graph, graph.results))
    read = {value for node in graph.nodes for value in node.inputs} | set(graph.results)
    afters = [i for i, value in after.items() if value in read]
    begun = {f"after{i}": at[body.inputs[i]] for i in afters}
    read |= set(begun.values())

    def numbers(values: Iterable[Value]) -> list[int]:
        return [i for i, value in enumerate(values) if at[value] in read]

    kept, slices = numbers(loop.results[last:]), numbers(body.inputs[loop.carries : first])
    fixed, constants = numbers(body.inputs[first:]), tuple(value for value in b.stored if value in read)
    inputs = [*flow.values(), *sums.values(), *(after[i] for i in afters), *given.values()]
    inputs += [at[loop.results[last + i]] for i in kept] + [at[body.inputs[loop.carries + i]] for i in slices]
    inputs += [at[body.inputs[first + i]] for i in fixed]
    order = {name: graph.outputs[name] for name in outputs} | begun | dict(graph.outputs)
    return _Step(
        _only_inputs(replace(graph, outputs=order), inputs, constants),
        flows=tuple(moving),
        sums=tuple(sums),
        afters=tuple(afters),
        given=tuple(given),
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
