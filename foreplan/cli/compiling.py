"""From MODEL and the settings of a command to a compiled step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from foreplan.base.errors import UsageError
from foreplan.cli.flags import DECIDED, flag_of, given
from foreplan.cli.model import model_with_options
from foreplan.cli.options import is_plan_file, working
from foreplan.options import Options

if TYPE_CHECKING:
    from foreplan.cli.settings import Settings
    from foreplan.compiler.compiled import Compiled
    from foreplan.graph import Graph


def without_recomputation(settings: Settings) -> Settings:
    """The settings without recomputation, which a curve adds."""
    return replace(settings, step=replace(settings.step, remat="off"))


def without_plan_file(settings: Settings) -> Settings:
    """The settings for a model beside which a plan file may be given."""
    return replace(settings, trust_code=False, weights_folder=None)


def at_batch(settings: Settings, batch: int) -> Settings:
    """The settings with another batch: the first axis of every shape that is given, or of every input."""
    if settings.shapes is None:
        return replace(settings, batch=batch)
    return replace(settings, shapes={name: (batch, *shape[1:]) for name, shape in settings.shapes.items()})


def compile_at(model: str, settings: Settings, batch: int, step: Options) -> Compiled:
    """The step of MODEL with another batch, and with other options of a compiled step of it."""
    from foreplan.compiler import api

    with working(f"compiling {model} at batch {batch:,}"):
        return api.compile_with(model_with_options(model, at_batch(settings, batch))[0], step)


def compile_model(model: str, settings: Settings) -> Compiled:
    """Import or build the model that MODEL names, and compile its step."""
    from foreplan.compiler import api

    with working(f"compiling {model}"):
        graph, step = model_with_options(model, settings)
        if step.accumulate != "auto":
            return api.compile_with(graph, step)
        return api.compile_with(partial(_made, model, settings, batch=_batch(model, graph)), step)


def _made(model: str, settings: Settings, batch: int) -> Graph:
    """The model at a batch."""
    return model_with_options(model, at_batch(settings, batch))[0]


def _batch(model: str, graph: Graph) -> int:
    """The batch of a model, which is split into micro-batches."""
    from foreplan.fit.fitting import batch_of

    found = batch_of(graph)
    if found is None:
        raise UsageError(
            f"the inputs of {model!r} begin with different axes, so there is no batch to split: say the number of "
            "micro-batches (--accumulate 4)"
        )
    return found


def open_compiled(text: str, settings: Settings) -> Compiled:
    """The compiled step of a plan file, or of a model."""
    if is_plan_file(text):
        from foreplan.compiler.compiled import load_plan

        if written := given(*DECIDED):
            option = flag_of(written[0])
            raise UsageError(f"{text!r} is a plan, which has decided on {option} already: give the model instead")
        return load_plan(text, trust_code=settings.trust_code, weights_folder=settings.weights_folder)
    return compile_model(text, settings)
