"""Inference within a budget that whole tensors do not meet: the model in parts, with as little more work as can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foreplan.errors import DoesNotFitError
from foreplan.graph import Graph
from foreplan.lower import Program
from foreplan.passes.pipeline import simplified
from foreplan.passes.split_dominant import ways_in_parts
from foreplan.planner import Plan

EXTRA = 0.5  # the most that parts may add to the work
TRIES = 4  # ways that are planned


def in_less(
    graph: Graph, refused: DoesNotFitError, planned: Callable[[Graph, int], tuple[Program, Plan]]
) -> tuple[Graph, Program, Plan]:
    """A forward graph in parts, lowered and planned within the budget that it did not meet as it is.

    Args:
        refused: says the budget, and what the graph needs.
        planned: lowers a graph, and plans it within bytes.

    Raises:
        DoesNotFitError: no way that was found meets it either; of the one that needs the least.
    """
    stored = sum(value.type.nbytes for value in graph.stored)
    ways = ways_in_parts(graph, EXTRA)
    fitting = [way for way in ways if stored + way.peak <= refused.capacity]
    for way in [*reversed(fitting)][:TRIES] if fitting else ways[:1]:
        split = simplified(way.graph)
        try:
            program, plan = planned(split, refused.capacity)
        except DoesNotFitError as error:
            refused = min(refused, error, key=lambda one: one.needed)
        else:
            return split, program, replace(plan, budget=refused.capacity)
    raise refused
