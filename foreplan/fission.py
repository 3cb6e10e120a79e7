"""Steps in parts, where a budget asks for them: with as little more time as can be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from foreplan.errors import DoesNotFitError
from foreplan.graph import Graph
from foreplan.lower import Program
from foreplan.passes.pipeline import simplified
from foreplan.passes.split_dominant import ways_in_parts
from foreplan.planner import Plan, totals

EXTRA = 0.5  # the most that parts may add to the work of inference
TRIES = 4  # ways that are planned
DEAR = 0.02  # recomputation of a step that adds more to its time is held against parts

Planned = tuple[Graph, Program, Plan]


def inference_in_less(
    graph: Graph, refused: DoesNotFitError, planned: Callable[[Graph, int], tuple[Program, Plan]]
) -> Planned:
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


def training_in_pieces(
    whole: Planned | DoesNotFitError, pieces: Callable[[], Graph], planned: Callable[[Graph, int], tuple[Program, Plan]]
) -> Planned:
    """A training step within a budget: as it is or, where that takes less time, with activations in pieces.

    Args:
        whole: as it is; or why not.
        pieces: the step with what is large between convolutions in pieces.
        planned: lowers a graph, and plans it within bytes.

    Raises:
        DoesNotFitError: neither is within the budget; of the one that needs less.
    """
    if not isinstance(whole, DoesNotFitError) and _extra(whole) <= DEAR:
        return whole
    graph = pieces()
    if isinstance(whole, DoesNotFitError):
        try:
            return graph, *planned(graph, whole.capacity)
        except DoesNotFitError as error:
            raise min(whole, error, key=lambda one: one.needed) from None
    budget = whole[2].budget
    if budget is None or graph.as_text() == whole[0].as_text():
        return whole
    with suppress(DoesNotFitError):
        found = graph, *planned(graph, budget)
        return min(whole, found, key=_seconds)
    return whole


def _extra(step: Planned) -> float:
    """What recomputation adds to the time of a step, as a share."""
    _, program, plan = step
    return totals(program, [[run.action for run in plan.steps]])[0].extra_seconds_ratio


def _seconds(step: Planned) -> float:
    _, program, plan = step
    return totals(program, [[run.action for run in plan.steps]])[0].nanoseconds / 1e9
