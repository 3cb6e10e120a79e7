"""Steps in parts, where a budget asks for them: with as little more time as can be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from foreplan.errors import DoesNotFitError
from foreplan.graph import Graph
from foreplan.lower import Program
from foreplan.ops.conv.ops import Conv
from foreplan.passes.pipeline import simplified
from foreplan.passes.split_dominant import ways_in_parts
from foreplan.planner import Plan, Totals, totals

EXTRA = 0.5  # the most that parts may add to the work of inference
TRIES = 4  # ways that are planned
DEAR = 0.02  # recomputation of a step that adds more to its time is held against parts

Planned = tuple[Graph, Program, Plan]
Within = Callable[[Graph, int], Planned]  # lowers a graph, and plans it within bytes


def inference_in_parts(graph: Graph, whole: Callable[[], Planned], planned: Within) -> Planned:
    """A forward graph within a budget: as it is or, where it does not meet the budget, in parts.

    Args:
        whole: plans it as it is.

    Raises:
        DoesNotFitError: no way that was found meets the budget; of the one that needs the least.
    """
    try:
        return whole()
    except DoesNotFitError as error:
        refused = error
    stored = sum(value.type.nbytes for value in graph.stored)
    ways = ways_in_parts(graph, EXTRA)
    fitting = [way for way in ways if stored + way.peak <= refused.capacity]
    for way in [*reversed(fitting)][:TRIES] if fitting else ways[:1]:
        try:
            return planned(simplified(way.graph), refused.capacity)
        except DoesNotFitError as error:
            refused = min(refused, error, key=lambda one: one.needed)
    raise refused


def training_in_pieces(
    step: Graph, whole: Callable[[], Planned], pieces: Callable[[], Graph], planned: Within
) -> Planned:
    """A training step within a budget: as it is or, where that takes less time, with activations in pieces.

    Args:
        whole: plans it as it is.
        pieces: makes the step with what is large between convolutions in pieces.

    Raises:
        DoesNotFitError: neither is within the budget; of the one that needs less.
    """
    try:
        found = whole()
    except DoesNotFitError as refused:
        split = _in_pieces(step, pieces)
        if split is None:
            raise
        try:
            return planned(split, refused.capacity)
        except DoesNotFitError as error:
            raise min(refused, error, key=lambda one: one.needed) from None
    budget = found[2].budget
    if budget is None or _costs(found).extra_seconds_ratio <= DEAR:
        return found
    split = _in_pieces(step, pieces)
    with suppress(DoesNotFitError):
        if split is not None:
            return min(found, planned(split, budget), key=lambda one: _costs(one).nanoseconds)
    return found


def _in_pieces(step: Graph, pieces: Callable[[], Graph]) -> Graph | None:
    """The step in pieces; None: nothing of it is."""
    if not any(isinstance(node.op, Conv) for node in step.nodes):
        return None
    split = pieces()
    return None if split.as_text() == step.as_text() else split


def _costs(step: Planned) -> Totals:
    _, program, plan = step
    return totals(program, [[run.action for run in plan.steps]])[0]
