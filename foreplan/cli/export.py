"""The command that writes ONNX files: export."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from foreplan.base.errors import UsageError
from foreplan.base.files import check_writable
from foreplan.base.units import format_bytes
from foreplan.cli.flags import command, json_option, model_options, out_option, settings_from
from foreplan.cli.model import model_with_options
from foreplan.cli.options import echo, is_plan_file, print_json, seed_option, working
from foreplan.cli.weights import load_weights, weights_options

if TYPE_CHECKING:
    from foreplan.cli.settings import Settings
    from foreplan.compiler.compiled import Compiled


@command(short_help="Write a model with its weights, or its training step, as an ONNX file.")
@model_options
@weights_options
@out_option("OUT.onnx", "Where to write it.", required=True)
@click.option("--graph", is_flag=True, help="Write foreplan's own graph of the model, not the ONNX file's.")
@click.option("--step", is_flag=True, help="Write the whole training step: loss, gradients and updates.")
@seed_option
@json_option
def export(
    model: str, weights: str | None, path: str, graph: bool, step: bool, seed: int, as_json: bool, **options: Any
) -> None:
    """Write MODEL as an ONNX file, with the weights of a checkpoint.

    An ONNX file keeps its graph and gets the new weights. A zoo model becomes a graph of standard ops. With --step,
    whatever a step changes is an input x and an output x/next of the file.

    \b
    Examples:
      foreplan export model.onnx --weights w.safetensors -o trained.onnx
      foreplan export resnet50 --batch 1 --weights w.safetensors -o resnet50.onnx
      foreplan export model.onnx --batch 8 --step --optimizer adamw -o step.onnx
    """
    settings = settings_from(options)
    if graph and step:
        raise UsageError("--graph writes the model, and --step the step that trains it: give one")
    if step and settings.infer:
        raise UsageError("--step writes a training step: leave --infer out")
    if is_plan_file(model):
        raise UsageError(f"{model!r} is a plan, which has no graph to write: give the model itself")
    check_writable(path)
    with working(f"compiling {model}"):
        compiled = _compiled(model, replace(settings, infer=not step))
        session = compiled.bind(seed=seed)
        load_weights(session, weights, options)
    form = "step" if step else "graph" if graph else "model"
    with working(f"writing {path}"):
        written = {str(each): os.path.getsize(each) for each in session.to_onnx(path, form)}
    if as_json:
        print_json({"form": form, "files": written})
    else:
        echo("wrote " + " and ".join(f"{name} ({format_bytes(nbytes)})" for name, nbytes in written.items()))


def _compiled(model: str, settings: Settings) -> Compiled:
    """A step whose weights are those of `train`: quantised and narrow ones become float32, unless --narrow-weights is
    given.
    """
    from foreplan.compiler import api
    from foreplan.passes.master_weights import master_weights
    from foreplan.passes.quantised_weights import quantised_weights

    graph, chosen = model_with_options(model, settings)
    wide = quantised_weights(graph) if settings.infer else graph
    wide = wide if chosen.narrow_weights or not settings.infer else master_weights(wide)
    return replace(api.compile_with(wide, chosen), model=graph)


COMMANDS = (export,)
