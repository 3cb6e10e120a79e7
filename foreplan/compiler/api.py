"""The front door: import → differentiate → lower → plan → bind; `compile` is all of them in a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foreplan.base.arguments import flag, instance, names_in
from foreplan.base.collection import without_collection
from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.base.once import seconds_spent
from foreplan.base.patterns import Selection
from foreplan.base.units import listed, parse_budget
from foreplan.compiler.advice import of_halves
from foreplan.compiler.auto_parts import in_parts
from foreplan.compiler.compiled import Compiled
from foreplan.compiler.forms import planned
from foreplan.compiler.kept_plans import kept_plan
from foreplan.compiler.planning import CHOOSES, plan, within
from foreplan.compiler.segments import NOT_RECOMPUTED, RECOMPUTES, own_segments
from foreplan.compiler.step_graphs import (
    A_MODEL,
    forward_graph,
    graphs_of_step,
    halves,
    lowered,
    training_step,
    weights_as_trained,
)
from foreplan.graph import Graph
from foreplan.lower import Program
from foreplan.lower.outside import Use, beside
from foreplan.lower.prefetch import with_prefetch
from foreplan.options import Options
from foreplan.options.arguments import taking_options
from foreplan.passes.optimizer import Optimizer
from foreplan.planner import Beside, Plan

if TYPE_CHECKING:
    from foreplan.runtime.update import Update

_BESIDE = "checkpoint says all that is recomputed, and {} what is beside the planner's choice: give one"


def differentiate(
    graph: Graph,
    loss: Any = None,
    optimizer: Optimizer | None = None,
    outputs: Iterable[str] = (),
    precision: str = "float32",
) -> Graph:
    """The whole training step of a model: forward, loss, backward and updates in one graph.

    Args:
        graph: a model in inference form.
        loss: one of `foreplan.losses`, or a traceable function of the model's outputs and of further inputs (its
            parameters with a `foreplan.spec` as default). None where the graph has a loss already.
        optimizer: one of `foreplan.optim`; None: the step returns gradients and updates no parameter.
        outputs: names of what a step returns beside the loss. An output that is returned must stay alive.
        precision: see `compile`.

    Raises:
        ModelError: nothing can be differentiated; names the node.
        UsageError: an output or a precision that does not exist.
    """
    return training_step(graph, Options(loss, optimizer, outputs=outputs, precision=precision))


def micro_batches(
    graph: Graph,
    loss: Any,
    optimizer: Optimizer | None,
    outputs: Iterable[str] = (),
    precision: str = "float32",
) -> tuple[Graph, Graph]:
    """A training step that accumulates the gradients of micro-batches, as two graphs of the same stored values.

    The first runs for each micro-batch: forward, loss and backward, which adds to gradients that are kept, and counts.
    The second runs once after them: updates with the mean gradients, which it then clears.

    Args:
        graph, loss, optimizer, outputs, precision: see `differentiate`; there must be an optimizer.

    Raises:
        ModelError, UsageError: see `differentiate`.
    """
    return halves(graph, Options(loss, optimizer, outputs=outputs, precision=precision))


def inference(graph: Graph, outputs: Iterable[str] | None = None, precision: str = "float32") -> Graph:
    """The forward pass alone, simplified: attention is one op, and concatenations that only a convolution reads are
    split.

    Args:
        graph: a model in inference form.
        outputs: names of what a step returns; all of the model's outputs by default.
        precision: see `compile`.
    """
    return forward_graph(graph, Options(outputs=outputs, precision=precision))


def evaluation(
    graph: Graph,
    loss: Any = None,
    metrics: Any = (),
    *,
    train: Iterable[str] = (),
    freeze: Iterable[str] = (),
    narrow_weights: bool = False,
) -> Graph:
    """A model with what it is measured by: the forward pass, whose outputs are `loss` and the metrics by name.

    Compiled without a loss, it measures: `compile(evaluation(graph, losses.cross_entropy, ["accuracy"]))`. A session of
    it can share the weights of one that trains (`bind(share=…)`): weights in float16 and bfloat16, and those that the
    file has quantised, are kept as they are there.

    Args:
        graph: a model in inference form.
        loss: as `compile` takes it; None where the graph has a loss already.
        metrics: names of `foreplan.metrics`, or a mapping from names to metrics, losses, or functions like a loss.
        train, freeze, narrow_weights: those that the step which trains is compiled with.

    Raises:
        UsageError: there is no loss, or no such metric.
        ShapeError, TraceError: the loss or a metric does not fit the outputs.
    """
    from foreplan.frontend.evaluation import with_metrics

    instance("a model", graph, Graph, A_MODEL)
    chosen = metrics if isinstance(metrics, Mapping) else {name: name for name in names_in("metrics", metrics)}
    selection = Selection(tuple(names_in("train", train)), tuple(names_in("freeze", freeze)))
    return with_metrics(weights_as_trained(graph, selection, flag("narrow_weights", narrow_weights)), loss, chosen)


@taking_options(Options)
def compile(graph: Graph | Callable[..., Graph], options: Options) -> Compiled:
    """Compile a model and plan every byte of one step. Nothing is allocated.

    Args:
        graph: from `from_onnx`, `trace` or `models`; with `accumulate="auto"` a function from `batch` to that.
        {options}

    Raises:
        DoesNotFitError: the budget cannot be met; says the least that can.
        ForeplanError: anything else that cannot be compiled; says what and where.
    """
    return compile_with(graph, options)


def compile_with(graph: Graph | Callable[..., Graph], options: Options) -> Compiled:
    """As `compile`, with the options as one object.

    Raises:
        DoesNotFitError, ForeplanError: see `compile`.
    """
    if options.accumulate == "auto" and options.stages == 1:
        return in_parts(graph, options, compile_with)
    started, before = time.perf_counter(), seconds_spent()
    graph = instance("a model", graph, Graph, A_MODEL)
    if segments := own_segments(graph, options):
        return _recomputing(graph, options, segments)
    with without_collection():
        step, last = graphs_of_step(graph, options)
        if options.offload and step.loss is None:
            raise UsageError("offload copies what the backward pass reads, and this is inference: give a loss")
        entries = tuple(options.checkpoint or ())
        if options.offload and entries:
            raise UsageError(CHOOSES.format("offload"))
        if entries and options.activations:
            raise UsageError(_BESIDE.format(next(options.activations.entries())[0]))
        program = lowered(step, options)
        after = None if last is None else lowered(last, options.without_activations, False)
        after = after and replace(after, regions=program.regions)
        if after is not None and options.prefetch:
            after = with_prefetch(after, program)
        if after is None:
            step, program, found = planned(graph, step, program, options)
            update = None
        else:
            found, update = _planned_halves(program, after, options)
        once = seconds_spent() - before
        return Compiled(program, found, step, time.perf_counter() - started - once, once, update, options, graph)


def _recomputing(graph: Graph, options: Options, segments: tuple[str, ...]) -> Compiled:
    """The step that recomputes what its module does; all as if it said nothing, where that cannot be."""
    try:
        step, note = compile_with(graph, replace(options, checkpoint=segments)), RECOMPUTES.format(listed(segments, 4))
    except UsageError as error:
        step, note = compile_with(graph, replace(options, checkpoint=())), NOT_RECOMPUTED.format(error)
    return replace(step, program=replace(step.program, notes=(*step.program.notes, note)))


def _planned_halves(body: Program, update: Program, options: Options) -> tuple[Plan, Update]:
    """The plans of the two halves of a step that accumulates gradients. There is little to recompute in the second,
    which is planned within the budget of the first."""
    from foreplan.runtime.update import Update

    def counted(half: Program, other: Program, its: Plan) -> Beside | None:
        is_share = isinstance(parse_budget(options.budget), float)
        return None if is_share else beside(half, Use(other=(other, its)))

    entries, later, earlier = tuple(options.checkpoint or ()), None, None
    if options.budget is None or entries:
        first = plan(body, options.budget, options.remat, entries)
    else:
        later = counted(body, update, kept_plan(update, None, "off"))
        try:
            first = within(body, options.budget, options.remat, later)
        except DoesNotFitError as error:
            raise of_halves(error, update, later and beside(update)) from None
        earlier = counted(update, body, first)
    second = within(update, first.budget, "off" if first.budget is None else "auto", earlier)
    return first, Update(int(options.accumulate), update, second)


def from_onnx(
    model: Any,
    shapes: dict[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    train: Iterable[str] = (),
    freeze: Iterable[str] = (),
) -> Graph:
    """A model from an ONNX file (see `foreplan.frontend.from_onnx`)."""
    from foreplan.frontend import from_onnx as load

    return load(model, shapes=shapes, batch=batch, values=values, train=train, freeze=freeze)
