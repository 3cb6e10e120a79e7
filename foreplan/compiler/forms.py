"""Steps in parts, where a budget asks for them: with as little more time as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from foreplan.base.collection import without_collection
from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.compiler.compiled import Compiled
from foreplan.compiler.pipeline import Fission, Form, passes_of_training
from foreplan.compiler.planning import plan
from foreplan.compiler.prices import DEAR, adds_little, base_nanoseconds, is_dear
from foreplan.compiler.step_graphs import check_training, lowered, uses_of
from foreplan.graph import Graph
from foreplan.lower import Program
from foreplan.ops.conv.ops import Conv
from foreplan.options import Options
from foreplan.passes.pipeline import Stage, of_stages, run_passes, simplified
from foreplan.passes.properties import is_step
from foreplan.passes.split_dominant import ways_in_parts
from foreplan.planner import Plan, totals
from foreplan.planner.memory.order_bound import order_bound

EXTRA = 0.5  # the most that parts may add to the work of inference, and bands to the time of a training step
TRIES = 4  # ways that are planned
BANDS = (2, 3, 4, 6, 8, 12)  # in how many an image is tried

Planned = tuple[Graph, Program, Plan]
# Makes a training step with some of it in parts: in how many bands, if any. None where it has made the same before.
InParts = Callable[[Fission, int], Graph | None]


def planned(graph: Graph, step: Graph, program: Program, options: Options) -> Planned:
    """The plan of a step that was made of a graph; within a budget, in parts where that serves.

    Raises:
        DoesNotFitError: no form that was found meets the budget; of the one that needs the least.
    """

    def whole() -> Planned:
        return step, program, plan(program, options.budget, options.remat, options.checkpoint or ())

    if options.budget is None or not options.splits or is_step(graph):
        return whole()
    if step.loss is None:
        return _inference_in_parts(step, program, whole, options)
    return _training_in_parts(step, program, whole, _in_form(graph, options), options)


def other_forms(step: Compiled, allowed: int | None = None) -> Iterator[tuple[Graph, Program]]:
    """A step with more of it in parts, lowered: what `planned` chooses from, beside the step as it is.

    Args:
        step: with its graphs; one from a plan file, or with micro-batches, has no other forms.
        allowed: the budget in bytes, if there is one.
    """
    parts = step.options.splits and step.update is None
    if step.model is None or step.graph is None or not parts or is_step(step.model):
        return iter(())
    if step.program.loss is None:
        return _forms_of_inference(step.graph, step.program, step.options, allowed)
    return _forms_of_training(step.graph, step.program, _in_form(step.model, step.options), step.options)


def _in_form(graph: Graph, options: Options) -> InParts:
    """What makes a training step with some of it in parts."""
    check_training(graph, options)
    start = run_passes(graph, of_stages(passes_of_training(options), (Stage.FORWARD,)))
    seen = set[str]()

    def form(fission: Fission, bands: int) -> Graph | None:
        entries = passes_of_training(options, Form(fission, bands), uses_of(options))
        with without_collection():
            forward = run_passes(start, of_stages(entries, (Stage.MEMORY,)))
            if (text := forward.as_text()) in seen:
                return None
            seen.add(text)
            found = run_passes(forward, of_stages(entries, (Stage.TRAINING,)))
        if options.named:
            try:
                lowered(found, options)
            except UsageError:  # what is said of activations by name has no meaning there
                return None
        return found

    return form


def _inference_in_parts(graph: Graph, program: Program, whole: Callable[[], Planned], options: Options) -> Planned:
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
    for split, of_split in _forms_of_inference(graph, program, options, refused.capacity):
        try:
            return split, of_split, plan(of_split, refused.capacity, options.remat)
        except DoesNotFitError as error:
            refused = min(refused, error, key=lambda one: one.needed)
    raise refused


def _forms_of_inference(
    graph: Graph, program: Program, options: Options, allowed: int | None = None
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
        yield split, _beside(lowered(split, options), program)


def _training_in_parts(
    step: Graph, program: Program, whole: Callable[[], Planned], form: InParts, options: Options
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

    def look(graph: Graph, its: Program) -> None:
        try:
            known.append((graph, its, plan(its, allowed, options.remat)))
        except DoesNotFitError as error:
            refused.append(error)

    beyond: list[tuple[int, Graph, Program]] = []  # forms that no schedule brings within the budget
    forms = [(base_nanoseconds(its), graph, its) for graph, its in _forms_of_training(step, program, form, options)]
    for base, graph, its in sorted(forms, key=lambda one: one[0]):
        if known and base >= min(map(_time, known)):
            break  # recomputation only adds to it
        if (least := order_bound(its)) > allowed:
            beyond.append((least, graph, its))
        else:
            look(graph, its)
    if known:
        return min(known, key=_time)
    for least, graph, its in sorted(beyond, key=lambda one: one[0]):
        if least < min(error.needed for error in refused):  # it may need less than what is known
            look(graph, its)
    raise min(refused, key=lambda error: error.needed)


def _forms_of_training(
    step: Graph, program: Program, form: InParts, options: Options
) -> Iterator[tuple[Graph, Program]]:
    """The other forms of a training step, each once. Only convolutions have bands, and channels in parts.

    Args:
        program: of the step as it is.
        form: makes the step in parts.
    """
    base = base_nanoseconds(program)
    seen = {_content(step)}

    def made(fission: Fission, bands: int = 0) -> tuple[Graph, Program] | None:
        graph = form(fission, bands)
        if graph is None or (content := _content(graph)) in seen:
            return None
        seen.add(content)
        return graph, _beside(lowered(graph, options), program)

    samples = made(Fission.SAMPLES)
    if samples is not None:
        if base_nanoseconds(samples[1]) > (1 + DEAR) * base:
            yield from filter(None, [made(Fission.FEW)])
        rows = made(Fission.ROWS)
        yield rows if rows is not None and adds_little(samples[1], rows[1]) else samples
    if any(isinstance(node.op, Conv) for node in step.nodes):
        for bands in BANDS:
            banded = made(Fission.BANDS, bands)
            if banded is None or base_nanoseconds(banded[1]) > (1 + EXTRA) * base:
                break
            yield banded
        yield from filter(None, map(made, (Fission.CHANNELS, Fission.PIECES, Fission.OFF)))


def _content(graph: Graph) -> tuple[str, ...]:
    """What equal graphs have in common, however they list their nodes: the planner chooses an order itself."""
    return tuple(sorted(graph.as_text().splitlines()))


def _time(step: Planned) -> int:
    _, program, plan = step
    return program.costs(plan).nanoseconds


def _beside(split: Program, whole: Program) -> Program:
    """A program in parts, whose costs are compared with those of the step as it is; a note says what the parts add."""
    base = totals(whole, [()])[0]
    extra = base_nanoseconds(split) / max(1, base.base_nanoseconds) - 1
    note = f"what runs in parts was chosen for the budget, and adds {extra:+.1%} to the predicted time"
    return replace(split, notes=(*split.notes, note), base=(base.base_flops, base.base_nanoseconds))
