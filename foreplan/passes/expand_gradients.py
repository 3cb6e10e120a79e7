"""Gradients that a model asks for → the nodes that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.base.errors import ModelError
from foreplan.graph import Array, Builder, Fill, Graph, Kind, Node, TensorType, Value
from foreplan.ops.marks import Gradient
from foreplan.ops.pullback import pulled_back
from foreplan.ops.shape import broadcast_to
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite_ops


@dataclass(frozen=True)
class ExpandGradients(Pass, requires=("forward",), ensures=("no inner gradients",)):
    """The graph with the nodes of each gradient in its place; later passes may differentiate them once more.

    Requires: ops are in the form wanted (see `training_form`), so that a gradient is that of what is computed.

    Raises:
        UnsupportedError: an op on the way has no derivative; names the node that asks.
    """

    def _run(self, graph: Graph) -> Graph:
        def replace(b: Builder, node: Node[Gradient], inputs: tuple[Value, ...]) -> Sequence[Value]:
            y, *xs = inputs
            before = tuple(b.nodes)
            b.scope = node.name + "/"
            one = b.store(b.scope + "one", y.type, Kind.CONSTANT, Array(np.ones((), y.dtype.numpy)))
            sources = list(dict.fromkeys(xs))
            try:
                found = dict(zip(sources, pulled_back(b, before, [(y, one)], sources)))
            except ModelError as error:
                where = f" ({node.source})" if node.source else ""
                raise type(error)(f"node {node.name!r}{where}: the gradient cannot be computed: {error}") from None
            return [found[x] or _zero(b, x) for x in xs]

        return rewrite_ops(graph, replace, Gradient) if graph.nodes_of(Gradient) else graph


expand_gradients = ExpandGradients()


def _zero(b: Builder, x: Value) -> Value:
    """What y does not depend on has no influence."""
    zero = b.store(b.scope + "zero", TensorType(x.dtype, ()), Kind.CONSTANT, Fill(0.0))
    return broadcast_to(b, zero, x.shape)
