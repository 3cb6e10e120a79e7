"""Ops without a kernel on a target → simpler ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foreplan.base.errors import UnsupportedError
from foreplan.graph import Builder, Graph, Node, Op, Value, Window
from foreplan.graph.ir import live_nodes
from foreplan.graph.op import Types, Windows
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite
from foreplan.passes.simplify import fuse_maps


class Machine(Protocol):
    """A target, as far as passes need to know it."""

    name: str

    def kernels(self, op: Op, inputs: Windows, outputs: Windows) -> Sequence[object]:
        """The candidates for an op on tensors with this layout; none: it is decomposed."""

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Whether one op should take the place of several ops."""


@dataclass(frozen=True)
class Decompose(Pass, requires=("plain ops",), ensures=("live", "kernels")):
    """The graph with only such ops as the target has a kernel for.

    Raises:
        UnsupportedError: it has none for an op, and the op no decomposition; names the node.
    """

    machine: Machine

    def _run(self, graph: Graph) -> Graph:
        def lacks(node: Node) -> bool:
            inputs, outputs = ([Window.dense(value.type) for value in values] for values in (node.inputs, node.outputs))
            return not node.op.is_view and not self.machine.kernels(node.op, inputs, outputs)

        def expand(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            if node not in lacking:
                return None
            b.scope, before = node.name + "/", len(b.nodes)
            simpler = node.op.decompose(b, inputs)
            if simpler is None or any(each.op == node.op and each.inputs == inputs for each in b.nodes[before:]):
                where = f" ({node.source})" if node.source else ""
                raise UnsupportedError(
                    f"node {node.name!r}{where}: target {self.machine.name} has no kernel for {node.op.name}"
                )
            return simpler

        while True:  # a decomposition may use ops that need one themselves
            live = live_nodes(graph, graph.results)
            lacking = {node for node in live if lacks(node)}
            if not lacking and len(live) == len(graph.nodes):
                return graph
            graph = fuse_maps(rewrite(graph, expand))
