"""What MODEL names: a file, a function of the user's, or a model of the zoo, with its loss and its adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import UnsupportedError, UsageError
from foreplan.cli.data import read_array
from foreplan.cli.factory import is_factory, made
from foreplan.cli.optimizer import make_optimizer, make_rate
from foreplan.cli.options import is_file

if TYPE_CHECKING:
    from foreplan.cli.settings import Settings
    from foreplan.graph import Graph
    from foreplan.options import Options


def with_batch(name: str, batch: int | None) -> str:
    """A zoo name with its batch replaced: `mlp:width=64` and 32 give `mlp:width=64,batch=32`."""
    if batch is None:
        return name
    model, _, arguments = name.partition(":")
    kept = [part for part in arguments.split(",") if part and part.partition("=")[0].strip() != "batch"]
    return f"{model}:{','.join([*kept, f'batch={batch}'])}"


def model_with_options(model: str, settings: Settings) -> tuple[Graph, Options]:
    """The model that MODEL names, with its loss where it is trained, and what it is compiled with."""
    if settings.trust_code or settings.weights_folder is not None:
        raise UsageError(f"{model!r} is no plan file, which --trust-code and --weights-folder are for: leave them out")
    if settings.step.accumulate != 1 and settings.infer:
        raise UsageError("--accumulate adds up gradients, and there are none with --infer: leave one of them out")
    if settings.step.offload and settings.infer:
        raise UsageError("--offload copies what the backward pass reads, and --infer has none: leave one of them out")
    graph, default = model_graph(model, settings)
    if settings.infer:
        return graph, settings.step
    from foreplan.frontend.losses import attach_loss

    graph = attach_loss(graph, settings.loss or default)
    optimizer = make_optimizer(
        settings.optimizer,
        make_rate(settings.schedule, settings.rate),
        clip_norm=settings.clip_norm,
        clip_value=settings.clip_value,
        weight_decay=settings.weight_decay,
        decay=settings.decay,
    )
    return graph, replace(settings.step, optimizer=optimizer)


def model_graph(model: str, settings: Settings) -> tuple[Graph, str]:
    """The model that MODEL names, in inference form and with its adapters, and the loss that it is trained with by
    default.
    """
    from foreplan import models
    from foreplan.compiler import api

    if model.endswith(".pt2") or is_factory(model):
        graph = _of_torch(model, settings)
        return _with_adapters(graph, settings), loss_by_default(graph)
    if is_file(model):
        chosen = {"train": settings.step.train, "freeze": settings.step.freeze}
        graph = api.from_onnx(model, settings.shapes, settings.batch, values=_read(settings.values), **chosen)
        return _with_adapters(graph, settings), loss_by_default(graph)
    if settings.values:
        raise UsageError("--values is for inputs of ONNX files that decide shapes; a zoo model has none")
    if settings.shapes:
        base = model.partition(":")[0]
        raise UsageError(f"--shapes is for ONNX files; a zoo model takes sizes in its name: {base}:batch=32")
    name = with_batch(model, settings.batch)
    return _with_adapters(models.build(name), settings), models.default_loss(name)


def _read(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """Values of inputs, with what files have in the place of their names."""
    return values and {name: read_array(each) if isinstance(each, str) else each for name, each in values.items()}


def loss_by_default(graph: Graph) -> str:
    """The loss of a model that says none: its first output, if that is one number, or the one of a classifier."""
    first = next(iter(graph.outputs.values()), None)
    return "sum" if first is not None and not first.shape and first.dtype.is_float else "cross_entropy"


def _of_torch(model: str, settings: Settings) -> Graph:
    """The graph of an exported program, or of what a function makes, in the shapes that are asked for."""
    from foreplan.compiler.modules import from_torch

    if settings.values:
        raise UsageError(
            "--values is for inputs of ONNX files that decide shapes; a module is exported with its shapes"
        )
    train, freeze = settings.step.train, settings.step.freeze
    if not is_factory(model):
        return _sized(model, from_torch(model, train=train, freeze=freeze), settings)
    found = made(model, settings.batch)
    graph = found.model
    if not found.is_graph:
        graph = from_torch(graph, *found.args, kwargs=found.kwargs, train=train, freeze=freeze, check=False)
    return graph if found.takes_batch and settings.shapes is None else _sized(model, graph, settings)


def _sized(model: str, graph: Graph, settings: Settings) -> Graph:
    """A graph for another number of samples.

    Raises:
        UsageError: there is no such input, or the samples cannot be told from one another; says what to do instead.
    """
    from foreplan.passes.resized import resized

    inputs = {value.name: value for value in graph.inputs if value.init is None}
    shapes = settings.shapes
    if shapes is None and settings.batch is not None:
        shapes = {name: (settings.batch, *value.shape[1:]) for name, value in inputs.items()}
    if shapes is None:
        return graph
    if others := [name for name in shapes if name not in inputs]:
        raise UsageError(f"{model!r} has no input {others[0]!r}; it has {', '.join(map(repr, inputs))}")
    where = "let the function take batch=" if is_factory(model) else "export the module on an example of that size"
    try:
        found = resized(graph, shapes)
    except UnsupportedError as error:
        raise UsageError(f"{error}. Instead, {where}") from None
    kept = {value.name for value in found.updates}
    if lost := [value.name for value in graph.updates if value.name not in kept]:
        raise UsageError(f"{lost[0]!r} of {model!r} follows from all samples of a step. Instead, {where}")
    return found


def _with_adapters(graph: Graph, settings: Settings) -> Graph:
    """The model with the adapters that the settings ask for."""
    said = {name: value for name in ("rank", "alpha") if (value := getattr(settings, name)) is not None}
    said |= {"dora": True} if settings.dora else {}
    if not settings.lora:
        if said:
            raise UsageError(f"--{min(said)} is that of adapters: say by --lora which weights get some")
        return graph
    from foreplan.passes.lora import lora

    return lora(graph, targets=settings.lora, **said)
