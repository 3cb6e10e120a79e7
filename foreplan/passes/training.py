"""Inference form → training form: batch statistics, random masks, saved indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Array, Builder, Graph, GraphBuilder, Kind, Node, RandomSeed, TensorType, Value
from foreplan.graph.types import DTYPES
from foreplan.ops.custom_gradient import CustomGradient
from foreplan.ops.map import elementwise
from foreplan.ops.marks import ByMode, Mark
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite, rewrite_ops


class _Training:
    """What ops ask for while they take their training form; implements `graph.op.Training`."""

    def __init__(self, ranks: int) -> None:
        self.builder: Builder = GraphBuilder()
        self.ranks = ranks
        self.updates: dict[Value, Value] = {}
        self._state: Value | None = None
        self._streams = 0

    def update(self, stored: Value, new: Value) -> None:
        self.updates[stored] = new

    def next_content(self, stored: Value) -> Value:
        return self.updates.get(stored, stored)

    def random_state(self) -> Value:
        if self._state is None:
            type = TensorType(DTYPES["uint64"], (2,))
            self._state = self.builder.store("random_state", type, Kind.STATE, RandomSeed())
        return self._state

    def next_stream(self) -> int:
        self._streams += 1
        return self._streams - 1

    def finish(self) -> None:
        """Let the random state move on by one step."""
        if self._state is not None:
            b = self.builder
            one = np.array([0, 1], np.uint64)
            step = b.store("random_step", self._state.type, Kind.CONSTANT, Array(one))
            self.updates[self._state] = elementwise(b, lambda s, d: s + d, self._state, step, name="next_random_state")


@dataclass(frozen=True)
class WithoutMarks(Pass, requires=("plain ops",), ensures=("no marks",)):
    """The graph without marks for differentiation, once that is done, or where it never will be."""

    def _run(self, graph: Graph) -> Graph:
        if not graph.nodes_of(Mark, CustomGradient):
            return graph
        passed = rewrite_ops(graph, lambda b, node, inputs: inputs[: len(node.outputs)], Mark, CustomGradient)
        return _without_idle_updates(passed)


without_marks = WithoutMarks()


def _without_idle_updates(graph: Graph) -> Graph:
    """The graph without updates that leave a stored value as it is, as those that training alone has (`ByMode`)."""
    updates = {old: new for old, new in graph.updates.items() if old is not new}
    return graph if len(updates) == len(graph.updates) else dataclasses.replace(graph, updates=updates)


def of_mode(graph: Graph, training: bool) -> Graph:
    """The graph without what it computes in the other mode alone, so that this takes no training form."""
    if not graph.nodes_of(ByMode):
        return graph
    return rewrite_ops(graph, lambda b, node, inputs: inputs[training : training + 1], ByMode)


@dataclass(frozen=True)
class TrainingForm(Pass, requires=("forward",), ensures=("forward", "training form")):
    """The graph with every op that behaves differently in training in its training form.

    Attributes:
        ranks: of how many ranks' batches batch normalisation will have the statistics (`sync_batch_norm`).

    Requires: a graph in inference form. Ensures: running statistics are updated each step; random ops read one
    `random_state` (STATE, uint64[2]) that changes each step.
    """

    ranks: int = 1

    def _run(self, graph: Graph) -> Graph:
        training, graph = _Training(self.ranks), of_mode(graph, True)

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            training.builder = b
            b.scope = node.name + "/"
            return node.op.for_training(b, inputs, training)

        def finish(b: Builder) -> None:
            training.builder = b
            b.scope = ""
            training.finish()

        return rewrite(graph, replace, updates=training.updates, finish=finish)


training_form = TrainingForm()
