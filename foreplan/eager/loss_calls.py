"""The loss of a model: PyTorch's op for it, where a graph's loss is one that foreplan has a name for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from foreplan.base.errors import ForeplanError
from foreplan.eager.autograd import Tape
from foreplan.eager.rules import losses, shape
from foreplan.eager.storage import Tensor
from foreplan.frontend.losses import Loss, attach_loss
from foreplan.frontend.losses.classes import CrossEntropy, NegativeLogLikelihood
from foreplan.frontend.losses.elements import BinaryCrossEntropy, Huber, MeanAbsoluteError, MeanSquaredError
from foreplan.frontend.losses.results import Mean, Sum
from foreplan.graph import Graph, Node
from foreplan.graph.ir import live_nodes

LossRule = Callable[[Tape, Any, Tensor, Tensor | None], Tensor]


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A loss that PyTorch has an op for.

    Attributes:
        loss: one of `foreplan.losses`.
        output: the name of the model's output that it reads.
    """

    loss: Loss
    output: str


def loss_call_of(graph: Graph) -> tuple[Graph, LossCall | None]:
    """A model without its loss, and the loss; or the graph as it is, where its loss is of another kind."""
    if graph.loss is None or not graph.outputs:
        return graph, None
    base = _without_loss(graph)
    own = set(base.nodes)
    nodes = _texts(node for node in live_nodes(graph, [graph.loss]) if node not in own)
    for kind in LOSSES:
        for name in base.outputs:
            try:
                other = attach_loss(base, kind(), [name])
            except ForeplanError:
                continue
            if _texts(other.nodes[len(base.nodes) :]) == nodes:
                return base, LossCall(kind(), name)
    return graph, None


def _without_loss(graph: Graph) -> Graph:
    """Inputs that the loss alone reads are left out."""
    nodes = live_nodes(graph, graph.outputs.values())
    read = {value for node in nodes for value in node.inputs} | set(graph.outputs.values())
    inputs = tuple(value for value in graph.inputs if value in read)
    return dataclasses.replace(graph, nodes=nodes, inputs=inputs, loss=None, updates={})


def _texts(nodes: Iterable[Node]) -> list[tuple[str, ...]]:
    return [(str(node.op), *(value.name for value in node.inputs)) for node in nodes]


def _classes(rule: Callable[[Tape, Tensor, Tensor], Tensor]) -> LossRule:
    """A loss of scores; where the classes lie last, items are put side by side first."""

    def of(tape: Tape, loss: Any, x: Tensor, target: Tensor | None) -> Tensor:
        assert target is not None
        if loss.class_axis(x.rank) == x.rank - 1 and x.rank > 2:
            items = math.prod(x.shape[:-1])
            x, target = shape.reshape(tape, x, (items, x.shape[-1])), shape.reshape(tape, target, (items,))
        return rule(tape, x, target)

    return of


def _elements(rule: Callable[[Tape, Tensor, Tensor], Tensor]) -> LossRule:
    def of(tape: Tape, loss: Any, x: Tensor, target: Tensor | None) -> Tensor:
        assert target is not None
        return rule(tape, x, target)

    return of


def _whole(how: str) -> LossRule:
    return lambda tape, loss, x, target: shape.reduce(tape, how, x, range(x.rank), False)


LOSSES: dict[type[Loss], LossRule] = {
    CrossEntropy: _classes(losses.cross_entropy),
    NegativeLogLikelihood: _classes(losses.nll),
    MeanSquaredError: _elements(losses.mse),
    Huber: _elements(losses.mse),
    MeanAbsoluteError: _elements(losses.mean_absolute),
    BinaryCrossEntropy: _elements(losses.binary_cross_entropy),
    Mean: _whole("mean"),
    Sum: _whole("sum"),
}
