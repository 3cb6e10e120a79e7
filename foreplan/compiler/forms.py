"""Forms of a step with more of it in parts, where a budget asks for them: the one that takes the least time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from foreplan.base.collection import without_collection
from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.compiler.compiled import Compiled
from foreplan.compiler.pipeline import passes_of_training
from foreplan.compiler.planning import plan
from foreplan.compiler.prices import DEAR, adds_little, base_nanoseconds, is_dear
from foreplan.compiler.step_graphs import check_training, lowered, uses_of
from foreplan.graph import Graph
from foreplan.lower import Program
from foreplan.ops.conv.ops import Conv
from foreplan.options import Options
from foreplan.passes.base import Pass
from foreplan.passes.pipeline import Stage, of_stages, run_passes, simplified
from foreplan.passes.properties import is_step
from foreplan.passes.tile.channels import split_channels, split_pieces
from foreplan.passes.tile.samples import SplitBands, SplitLogits, SplitSamples
from foreplan.passes.tile.stretches import ways_in_parts
from foreplan.planner import Plan, totals
from foreplan.planner.memory.order_bound import order_bound

EXTRA = 0.5  # the most that parts may add to the work of inference, and bands to the time of a training step
TRIES = 4  # ways of inference that are planned
FEW = 4  # parts of the batch, where kernels over fewer samples take long
BANDS = (2, 3, 4, 6, 8, 12)  # in how many an image is tried

Planned = tuple[Graph, Program, Plan]


@dataclass(frozen=True)
class Form:
    """A step, lowered.

    Attributes:
        nanoseconds: its predicted time without recomputation.
    """

    graph: Graph
    program: Program
    nanoseconds: int

    def planned(self, budget: int, options: Options) -> Planned:
        """With the plan of the least time within a budget.

        Raises:
            DoesNotFitError: there is none.
        """
        return self.graph, self.program, plan(self.program, budget, options.remat)


def planned(graph: Graph, step: Graph, program: Program, options: Options) -> Planned:
    """The plan of a step that was made of a graph; within a budget, in parts where that serves.

    It stays as it is where it meets the budget, and recomputation takes next to no time.

    Raises:
        DoesNotFitError: no form that was found meets the budget; of the one that needs the least.
    """
    known: list[Planned] = []
    refused: list[DoesNotFitError] = []
    try:
        known.append((step, program, plan(program, options.budget, options.remat, options.checkpoint or ())))
        budget = known[0][2].budget
    except DoesNotFitError as error:
        refused.append(error)
        budget = error.capacity
    fixed = budget is None or not options.splits or is_step(graph)
    if known and (fixed or not is_dear(*known[0][1:])):
        return known[0]
    if fixed:
        raise refused[0]
    assert budget is not None

    def look(form: Form) -> None:
        try:
            known.append(form.planned(budget, options))
        except DoesNotFitError as error:
            refused.append(error)

    beyond: list[tuple[int, Form]] = []  # forms that no schedule brings within the budget
    for form in sorted(_Forms(graph, step, program, options).all(budget), key=lambda form: form.nanoseconds):
        if known and form.nanoseconds >= min(map(_time, known)):
            break  # recomputation only adds to it
        if (least := order_bound(form.program)) > budget:
            beyond.append((least, form))
        else:
            look(form)
    if known:
        return min(known, key=_time)
    for least, form in sorted(beyond, key=lambda one: one[0]):
        if least < min(error.needed for error in refused):  # it may need less than what is known
            look(form)
    raise min(refused, key=lambda error: error.needed)


def other_forms(step: Compiled, allowed: int | None = None) -> Iterator[tuple[Graph, Program]]:
    """A step with more of it in parts, lowered: what `planned` chooses from, beside the step as it is.

    Args:
        step: with its graphs; one from a plan file, or with micro-batches, has no other forms.
        allowed: the budget in bytes, if there is one.
    """
    model, graph = step.model, step.graph
    if model is not None and graph is not None and step.options.splits and step.update is None and not is_step(model):
        for form in _Forms(model, graph, step.program, step.options).all(allowed):
            yield form.graph, form.program


class _Forms:
    """Makes the other forms of a step, each once."""

    def __init__(self, model: Graph, step: Graph, program: Program, options: Options) -> None:
        """No form is made yet.

        Args:
            model: what the step was made of.
            step, program: the step as it is.
        """
        self.model, self.step, self.options = model, step, options
        self.whole = totals(program, [()])[0]
        self.seen = {_content(step)}

    def all(self, allowed: int | None) -> Iterator[Form]:
        """Those that may serve.

        Args:
            allowed: bytes that the step may take, if that is known.
        """
        found = self.of_inference(allowed) if self.step.loss is None else self.of_training()
        return filter(None, found)

    def of_inference(self, allowed: int | None) -> Iterator[Form | None]:
        """A stretch in parts: the fastest of the ways that seem to need no more than is allowed, or the one of the
        least bytes; without a limit some of all ways, from the fastest to that of the least bytes.
        """
        ways = ways_in_parts(self.step, EXTRA)[::-1]
        if allowed is None:
            last = len(ways) - 1
            ways = [ways[i] for i in sorted({last * k // (TRIES - 1) for k in range(TRIES)})] if ways else []
        else:
            stored = sum(value.type.nbytes for value in self.step.stored)
            fitting = [way for way in ways if stored + way.peak <= allowed]
            ways = fitting[:TRIES] or ways[-1:]
        return (self.lowered(simplified(way.graph)) for way in ways)

    def of_training(self) -> Iterator[Form | None]:
        """Samples, rows of images, and channels in parts; only convolutions have bands, and channels in parts."""
        base = self.whole.base_nanoseconds
        if (samples := self.tiled(SplitSamples())) is not None:
            if samples.nanoseconds > (1 + DEAR) * base:
                yield self.tiled(SplitSamples(FEW))
            rows = self.tiled(SplitSamples(), SplitLogits())
            yield rows if rows is not None and adds_little(samples.program, rows.program) else samples
        if any(isinstance(node.op, Conv) for node in self.step.nodes):
            for bands in BANDS:
                banded = self.tiled(SplitBands(bands))
                if banded is None or banded.nanoseconds > (1 + EXTRA) * base:
                    break
                yield banded
            yield from map(self.tiled, (split_channels, split_pieces))
            yield self.tiled()

    def tiled(self, *tiles: Pass) -> Form | None:
        """The training step with tiles; None: there was an equal one, or what options say of activations by name has
        no meaning in it.
        """
        entries = passes_of_training(self.options, tiles, uses_of(self.options))
        with without_collection():
            forward = run_passes(self.start, of_stages(entries, (Stage.MEMORY,)))
            if (content := _content(forward)) in self.seen:
                return None
            self.seen.add(content)
            return self.lowered(run_passes(forward, of_stages(entries, (Stage.TRAINING,))))

    @cached_property
    def start(self) -> Graph:
        """The forward graph before tiles."""
        check_training(self.model, self.options)
        return run_passes(self.model, of_stages(passes_of_training(self.options), (Stage.FORWARD,)))

    def lowered(self, graph: Graph) -> Form | None:
        """A step's form of a graph, as `tiled`."""
        if (content := _content(graph)) in self.seen:
            return None
        self.seen.add(content)
        try:
            made = lowered(graph, self.options)
        except UsageError:
            if self.options.activations:
                return None
            raise
        taken, base = base_nanoseconds(made), self.whole.base_nanoseconds
        extra = taken / max(1, base) - 1
        note = f"what runs in parts was chosen for the budget, and adds {extra:+.1%} to the predicted time"
        beside = self.whole.base_flops, base  # costs are compared with those of the step as it is
        return Form(graph, replace(made, notes=(*made.notes, note), base=beside), taken)


def _content(graph: Graph) -> tuple[str, ...]:
    """What equal graphs have in common, however they list their nodes: the planner chooses an order itself."""
    return tuple(sorted(graph.as_text().splitlines()))


def _time(step: Planned) -> int:
    _, program, plan = step
    return program.costs(plan).nanoseconds
