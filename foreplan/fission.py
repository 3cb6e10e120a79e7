"""Steps in parts, where a budget asks for them: with as little more time as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from foreplan.errors import DoesNotFitError
from foreplan.graph import Graph
from foreplan.lower import Program
from foreplan.ops.conv.ops import Conv
from foreplan.passes import Fission
from foreplan.passes.pipeline import simplified
from foreplan.passes.split_dominant import ways_in_parts
from foreplan.planner import Plan, totals
from foreplan.planner.memory.order_bound import order_bound

EXTRA = 0.5  # the most that parts may add to the work of inference, and bands to the time of a training step
TRIES = 4  # ways that are planned
DEAR = 0.02  # recomputation of a step that adds more to its time is held against parts
BANDS = (2, 3, 4, 6, 8, 12)  # in how many an image is tried
LITTLE = 0.01  # what parts may add to the time of a step without a budget; recomputation may add as much

Planned = tuple[Graph, Program, Plan]
# Makes a training step with some of it in parts: in how many bands, if any. None where it has made the same before.
InParts = Callable[[Fission, int], Graph | None]


@dataclass(frozen=True)
class Tools:
    """What makes a plan of a graph.

    Attributes:
        lower: the program of a graph.
        plan: the plan of a program within bytes; raises DoesNotFitError.
    """

    lower: Callable[[Graph], Program]
    plan: Callable[[Program, int], Plan]


def inference_in_parts(graph: Graph, program: Program, whole: Callable[[], Planned], tools: Tools) -> Planned:
    """A forward graph within a budget: as it is or, where it does not meet the budget, in parts.

    Args:
        program: of the graph as it is.
        whole: plans it.

    Raises:
        DoesNotFitError: no way that was found meets the budget; of the one that needs the least.
    """
    try:
        return whole()
    except DoesNotFitError as error:
        refused = error
    for split, lowered in forms_of_inference(graph, program, tools, refused.capacity):
        try:
            return split, lowered, tools.plan(lowered, refused.capacity)
        except DoesNotFitError as error:
            refused = min(refused, error, key=lambda one: one.needed)
    raise refused


def forms_of_inference(
    graph: Graph, program: Program, tools: Tools, allowed: int | None = None
) -> Iterator[tuple[Graph, Program]]:
    """A forward graph with a stretch of it in parts, in some ways.

    Args:
        program: of the graph as it is.
        allowed: bytes. The fastest of the ways that seem to need no more come first; None: some of all ways, from the
            fastest to that of the least bytes.
    """
    ways = ways_in_parts(graph, EXTRA)[::-1]
    if allowed is None:
        last = len(ways) - 1
        ways = [ways[i] for i in sorted({last * k // (TRIES - 1) for k in range(TRIES)})] if ways else []
    else:
        stored = sum(value.type.nbytes for value in graph.stored)
        fitting = [way for way in ways if stored + way.peak <= allowed]
        ways = fitting[:TRIES] or ways[-1:]
    for way in ways:
        split = simplified(way.graph)
        yield split, _beside(tools.lower(split), program)


def training_in_parts(
    step: Graph, program: Program, whole: Callable[[], Planned], form: InParts, tools: Tools
) -> Planned:
    """A training step within a budget: as it is or, where recomputation takes time and parts take less, in parts.

    Args:
        program: of the step as it is.
        whole: plans it.
        form: makes the step in parts.

    Raises:
        DoesNotFitError: no way is within the budget; of the one that needs the least.
    """
    known: list[Planned] = []
    refused: list[DoesNotFitError] = []
    try:
        known.append(whole())
        budget = known[0][2].budget
        if budget is None or not is_dear(*known[0][1:]):
            return known[0]
        allowed = budget
    except DoesNotFitError as error:
        refused.append(error)
        allowed = error.capacity

    def look(graph: Graph, lowered: Program) -> None:
        try:
            known.append((graph, lowered, tools.plan(lowered, allowed)))
        except DoesNotFitError as error:
            refused.append(error)

    beyond: list[tuple[int, Graph, Program]] = []  # forms that no schedule brings within the budget
    forms = [
        (base_nanoseconds(lowered), graph, lowered) for graph, lowered in forms_of_training(step, program, form, tools)
    ]
    for base, graph, lowered in sorted(forms, key=lambda one: one[0]):
        if known and base >= min(map(_time, known)):
            break  # recomputation only adds to it
        if (least := order_bound(lowered)) > allowed:
            beyond.append((least, graph, lowered))
        else:
            look(graph, lowered)
    if known:
        return min(known, key=_time)
    for least, graph, lowered in sorted(beyond, key=lambda one: one[0]):
        if least < min(error.needed for error in refused):  # it may need less than what is known
            look(graph, lowered)
    raise min(refused, key=lambda error: error.needed)


def forms_of_training(step: Graph, program: Program, form: InParts, tools: Tools) -> Iterator[tuple[Graph, Program]]:
    """The other forms of a training step, each once. Only convolutions have bands, and channels in parts.

    Args:
        program: of the step as it is.
        form: makes the step in parts.
    """
    base = base_nanoseconds(program)
    seen = {_content(step)}

    def lowered(fission: Fission, bands: int = 0) -> tuple[Graph, Program] | None:
        graph = form(fission, bands)
        if graph is None or (content := _content(graph)) in seen:
            return None
        seen.add(content)
        return graph, _beside(tools.lower(graph), program)

    samples = lowered(Fission.SAMPLES)
    if samples is not None:
        if base_nanoseconds(samples[1]) > (1 + DEAR) * base:
            yield from filter(None, [lowered(Fission.FEW)])
        rows = lowered(Fission.ROWS)
        yield rows if rows is not None and adds_little(samples[1], rows[1]) else samples
    if any(isinstance(node.op, Conv) for node in step.nodes):
        for bands in BANDS:
            banded = lowered(Fission.BANDS, bands)
            if banded is None or base_nanoseconds(banded[1]) > (1 + EXTRA) * base:
                break
            yield banded
        yield from filter(None, map(lowered, (Fission.CHANNELS, Fission.PIECES, Fission.OFF)))


def _content(graph: Graph) -> tuple[str, ...]:
    """What equal graphs have in common, however they list their nodes: the planner chooses an order itself."""
    return tuple(sorted(graph.as_text().splitlines()))


def adds_little(whole: Program, split: Program) -> bool:
    """Whether a step with more of it in parts takes next to no more time: kernels over a part may be slow."""
    return base_nanoseconds(split) <= (1 + LITTLE) * base_nanoseconds(whole)


def base_nanoseconds(program: Program) -> int:
    """Predicted time without recomputation, by the fastest kernels."""
    return totals(program, [()])[0].base_nanoseconds


def is_dear(program: Program, plan: Plan) -> bool:
    """Whether recomputation adds so much to the predicted time that other forms of the step are looked at."""
    return program.costs(plan).nanoseconds > (1 + DEAR) * base_nanoseconds(program)


def _time(step: Planned) -> int:
    _, program, plan = step
    return program.costs(plan).nanoseconds


def _beside(split: Program, whole: Program) -> Program:
    """A program in parts, whose costs are compared with those of the step as it is; a note says what the parts add."""
    base = totals(whole, [()])[0]
    extra = base_nanoseconds(split) / max(1, base.base_nanoseconds) - 1
    note = f"what runs in parts was chosen for the budget, and adds {extra:+.1%} to the predicted time"
    return replace(split, notes=(*split.notes, note), base=(base.base_flops, base.base_nanoseconds))
