"""What runs beside a step, in its memory: evaluations of its model, and the step itself for fewer samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from foreplan.base.arguments import names_in, whole
from foreplan.base.errors import DoesNotFitError, UnsupportedError, UsageError
from foreplan.base.units import format_bytes
from foreplan.compiler.api import compile_with
from foreplan.compiler.compiled import Compiled
from foreplan.compiler.step_graphs import weights_as_trained
from foreplan.graph import Graph
from foreplan.graph.types import Shape
from foreplan.lower.program import ARENA
from foreplan.options import Options
from foreplan.passes import SelectOutputs, resized
from foreplan.runtime.beside import Evaluation, Metrics

_BY_HAND = "compile foreplan.evaluation(model of that batch, loss) and bind it with share=this session"
_SMALLER = f"return less (outputs=[]), or evaluate fewer samples at a time; or, with memory of its own, {_BY_HAND}"
_LEFT_OUT = "leave that batch out, or fill it up with other samples"


def evaluation_for(
    step: Compiled, samples: int | None, outputs: Iterable[str] | None, metrics: Metrics
) -> tuple[Compiled, Evaluation]:
    """What evaluates a number of samples along the first axis of all inputs; None: as many as the step takes.

    Raises:
        UsageError, UnsupportedError, DoesNotFitError: see `evaluation_of`.
    """
    shapes = {slot.name: slot.operand.type.shape for slot in step.program.required_inputs}
    if samples is not None:
        samples = whole("samples", samples, 1)
        batch = math.gcd(*(shape[0] for shape in shapes.values() if shape))
        if not batch or any(not shape for shape in shapes.values()):
            raise UsageError("the inputs of the step have no batch along their first axes: leave samples out")
        shapes = {name: (extent // batch * samples, *rest) for name, (extent, *rest) in shapes.items()}
    return evaluation_of(step, shapes, outputs, metrics)


def evaluation_of(
    step: Compiled, shapes: Mapping[str, Shape], outputs: Iterable[str] | None, metrics: Metrics
) -> tuple[Compiled, Evaluation]:
    """What evaluates a step's model: the forward pass in inference form, and its loss where that gets its inputs.

    Args:
        shapes: of the arrays that will be given, by name; names that the model and the loss do not have are ignored.
        outputs: of the model, that are returned; None: all of them.
        metrics: see `foreplan.evaluation`.

    Raises:
        UsageError: the step has no model, or is one of several ranks; there is no such output or metric, or no target.
        UnsupportedError: the model does not show how it computes another number of samples; names the node.
        DoesNotFitError: it needs more memory than the step's arena has for what lives within a step.
    """
    options = step.options
    graph, measured = _graph(step, shapes, outputs, metrics)
    used = Options(
        target=options.target,
        precision=options.precision,
        fission=options.fission,
        tune=options.tune,
        accuracy=options.accuracy,
        workspace=options.workspace,
        passes=options.passes,
    )
    made = _fitted(step, graph, used, "the evaluation", _SMALLER)
    loss = measured[0] if measured else None
    return made, Evaluation(made.program, made.plan, loss, measured[1:])


def step_of(step: Compiled, shapes: Mapping[str, Shape]) -> Compiled:
    """The same training step for another number of samples, whose session can use all memory of the first.

    Args:
        shapes: see `evaluation_of`; the model's inputs are among them, and the loss's.

    Raises:
        UsageError: the step accumulates gradients, prefetches, comes from a plan file or is one of several ranks.
        UnsupportedError, DoesNotFitError: see `evaluation_of`.
    """
    options, model = step.options, step.model
    several = options.ranks > 1 or options.stages > 1 or step.update is not None
    if model is None or several or options.prefetch or step.host_bytes:
        raise UsageError(
            "a step takes one batch alone that has micro-batches, prefetch, copies on the host or several ranks, or "
            f"that comes from a plan file: {_LEFT_OUT}"
        )
    graph = _resized(model, shapes, _LEFT_OUT)
    if lost := [old.name for old in model.updates if old.name not in {each.name for each in graph.updates}]:
        raise UsageError(f"what the step makes of {lost[0]!r} may depend on all samples: {_LEFT_OUT}")
    return _fitted(step, graph, replace(options, loss=_sized(options.loss, shapes)), "a step of this batch", _LEFT_OUT)


def _fitted(step: Compiled, graph: Graph, options: Options, what: str, way_out: str) -> Compiled:
    """A graph compiled so that what lives within a step fits the arena of another one."""
    made, room = compile_with(graph, options), _room(step)
    more = made.plan.heights[ARENA] - room
    if more <= 0:
        return made
    try:
        return compile_with(graph, replace(options, budget=made.counted_bytes - more))
    except DoesNotFitError as error:
        needed = room + error.needed - error.capacity
        own, there = format_bytes(needed), format_bytes(room)
        raise DoesNotFitError(
            f"does not fit: {what} needs {own} for what lives within it, and the arena of {step.program.model!r} has "
            f"{there}: {way_out}",
            needed=needed,
            capacity=room,
            lower_bound=error.lower_bound,
        ) from None


def _room(step: Compiled) -> int:
    """Bytes of a step's arena for what lives within it."""
    heights = step.plan.heights if step.update is None else step.update.heights(step.plan)
    return heights[ARENA]


def _graph(
    step: Compiled, shapes: Mapping[str, Shape], outputs: Iterable[str] | None, metrics: Metrics
) -> tuple[Graph, tuple[str, ...]]:
    """The graph of an evaluation, and the names of its outputs that are the loss and the metrics; none: no loss."""
    from foreplan.frontend.evaluation import LOSS, with_metrics
    from foreplan.frontend.losses import attach_loss

    options, model = step.options, step.model
    if model is None:
        raise UsageError("a plan file does not hold the model that is evaluated: compile the step from the model")
    if options.ranks > 1 or options.stages > 1:
        raise UsageError(
            f"a step of {options.ranks} ranks has no evaluation of its own: compile foreplan.evaluation(model, loss) "
            "with share=session on each rank, bind it with share=session, and average what they give"
        )
    chosen = metrics if isinstance(metrics, Mapping) else {name: name for name in names_in("metrics", metrics)}
    names = tuple(model.outputs) if outputs is None else names_in("outputs", outputs)
    loss = options.loss
    has_loss = loss is not None or model.loss is not None
    if model.loss is not None and not _given(model, shapes):
        model, has_loss = model.until(*names), False
    model = _resized(model, shapes, _BY_HAND)
    if loss is not None:
        loss = _sized(loss, shapes)
        targets = [x for x in attach_loss(model, loss).inputs if x not in model.inputs and x.init is None]
        has_loss = not targets or any(x.name in shapes for x in targets)
    graph = weights_as_trained(replace(model, updates={}), options.selection, options.narrow_weights)
    found = dict(SelectOutputs(names)(graph).outputs)
    if not has_loss:
        if chosen:
            raise UsageError("metrics compare outputs with targets, as the loss does: give its inputs, too")
        return replace(graph, outputs=found, loss=None), ()
    graph = with_metrics(graph, loss, {name: _sized(each, shapes) for name, each in chosen.items()})
    measured = (LOSS, *chosen)
    if clash := [name for name in measured if name in found]:
        raise UsageError(
            f"{clash[0]!r} is an output of the model, and what is measured: leave it out of outputs, such as outputs=[]"
        )
    return replace(graph, outputs={**found, **graph.outputs}), measured


def _given(model: Graph, shapes: Mapping[str, Shape]) -> bool:
    return all(value.init is not None or value.name in shapes for value in model.inputs)


def _resized(model: Graph, shapes: Mapping[str, Shape], way_out: str) -> Graph:
    try:
        return resized(model, shapes)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}. Instead, {way_out}") from None


def _sized(measure: Any, shapes: Mapping[str, Shape]) -> Any:
    """A loss or a metric; of a function, its further inputs (parameters with a Spec) in the shapes that are given."""
    import inspect

    from foreplan.frontend.losses import Loss
    from foreplan.frontend.tracing.specs import Spec

    if isinstance(measure, str | Loss) or not callable(measure):
        return measure
    specs = {
        name: each.default.type
        for name, each in inspect.signature(measure).parameters.items()
        if isinstance(each.default, Spec)
    }
    other = {
        name: Spec(type.with_shape(shapes[name]))
        for name, type in specs.items()
        if name in shapes and len(shapes[name]) == len(type.shape)
    }
    return partial(measure, **other) if other else measure
