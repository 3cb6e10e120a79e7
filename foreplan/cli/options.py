"""What the commands share: the options that choose a model and its step, and what they print to whom."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from foreplan.errors import UsageError

if TYPE_CHECKING:
    import rich.console

    from foreplan.api import Compiled
    from foreplan.passes.optimizer import Optimizer

# Control characters but line ends and tabs, those that turn the direction of writing, and bytes of paths that are no
# text: as JSON writes them.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
OPTIMIZERS = {"sgd": "SGD", "momentum": "Momentum", "nesterov": "Nesterov", "adam": "Adam", "adamw": "AdamW"}
LOSSES = ("cross_entropy", "binary_cross_entropy", "mse", "l1", "huber", "mean", "sum")
# Parameters of commands that a plan file leaves no choice about; the learning rate is an input of the step.
DECIDED = (
    "batch",
    "shapes",
    "train",
    "optimizer",
    "clip_norm",
    "loss",
    "target",
    "budget",
    "remat",
    "outputs",
    "checkpoint",
    "accumulate",
    "offload",
    "prefetch",
    "precision",
    "tune",
    "workspace",
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


threads_option = click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads of a step.")
seed_option = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def plan_file_options(function: _Function) -> _Function:
    """What a plan file may do: the options of every command that takes one."""
    trust = click.option("--trust-code", is_flag=True, help="Run machine code that a plan file has for a card.")
    folder = click.option(
        "--weights-folder", metavar="DIR", help="Where the weights are that a plan file names; beside it by default."
    )
    return trust(folder(function))


@dataclass(frozen=True)
class Settings:
    """How to make a step of a model, as the command line says it.

    Attributes:
        batch: extent of the batch axis; None leaves the model's own.
        shapes: input name → shape.
        train: the whole training step, as against the forward pass.
        optimizer: a key of OPTIMIZERS.
        rate: learning rate.
        clip_norm: what the norm of all gradients together is limited to; None: nothing.
        loss: one of LOSSES; empty: the model's own, cross-entropy for an ONNX file.
        budget: bytes, a text such as 2GiB, or a ratio below 1; None: no budget.
        outputs: names of what a step returns beside the loss.
        checkpoint: segments of the model to recompute.
        accumulate: how many micro-batches, each of the batch, a step adds the gradients of.
        offload: whether activations may be copied to host memory and back.
        prefetch: whether inputs have a second slot for the next batch.
        precision: what is computed with, a key of `passes.PRECISIONS`.
        tune: whether kernels are measured on this machine.
        workspace: the most of it for one action.
        trust_code: whether machine code in a plan file may run.
        weights_folder: where the weights that a plan file names are; None: beside it.
    """

    batch: int | None = None
    shapes: dict[str, tuple[int, ...]] | None = None
    train: bool = True
    optimizer: str = "nesterov"
    rate: float = 0.01
    clip_norm: float | None = None
    loss: str = ""
    target: str = "numpy"
    budget: str | float | None = None
    remat: str = "free"
    outputs: tuple[str, ...] = ()
    checkpoint: tuple[str, ...] = ()
    accumulate: int = 1
    offload: bool = False
    prefetch: bool = False
    precision: str = "float32"
    tune: bool = False
    workspace: str = "auto"
    trust_code: bool = False
    weights_folder: str | None = None


def with_threads(target: str, threads: int | None) -> tuple[str, int | None]:
    """The target with threads that a plan for it depends on, and those that are left to binding."""
    return (f"cpu:threads={threads}", None) if target == "cpu" and threads else (target, threads)


def parse_shapes(texts: tuple[str, ...]) -> dict[str, tuple[int, ...]] | None:
    """Shapes by input name, from texts such as `x:32x3x224x224` (several in one text are separated by commas).

    Raises:
        UsageError: a text is no shape, or a name comes twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in (part for group in texts for part in group.split(",") if part.strip()):
        name, colon, extents = text.strip().rpartition(":")
        numbers = extents.lower().split("x") if extents else []
        if not colon or not name or not all(n.isascii() and n.isdigit() for n in numbers):
            raise UsageError(f"{text!r} is not a shape; write name:extents, such as x:32x3x224x224")
        if name in shapes:
            raise UsageError(f"the shape of {name!r} is given twice")
        shapes[name] = tuple(int(n) for n in numbers)
    return shapes or None


def parse_budget(text: str | None) -> str | float | None:
    """A budget as `compile` takes it: a ratio such as 0.5 becomes a number, a size stays text."""
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        ratio = float(text)
        if 0 < ratio < 1:
            return ratio
    from foreplan.units import parse_bytes

    parse_bytes(text)
    return text


def with_batch(name: str, batch: int | None) -> str:
    """A zoo name with its batch replaced: `mlp:width=64` and 32 give `mlp:width=64,batch=32`."""
    if batch is None:
        return name
    model, _, arguments = name.partition(":")
    kept = [part for part in arguments.split(",") if part and part.partition("=")[0].strip() != "batch"]
    return f"{model}:{','.join([*kept, f'batch={batch}'])}"


def model_options(function: _Function) -> _Function:
    """MODEL and everything that says how to make a step of it."""
    for decorator in reversed(
        (
            click.argument("model"),
            plan_file_options,
            click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Extent of the batch axis."),
            click.option(
                "--shapes", multiple=True, metavar="X:32x3x224x224", help="Shape of an input; may be given again."
            ),
            click.option(
                "--train/--infer", default=True, help="The whole training step (the default), or the forward pass."
            ),
            click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="nesterov", show_default=True),
            click.option("--lr", "rate", type=float, default=0.01, show_default=True, help="Learning rate."),
            click.option(
                "--clip-norm", type=float, metavar="X", help="Scale gradients down to this norm of all together."
            ),
            click.option(
                "--loss",
                type=click.Choice(LOSSES),
                help="On the first output. By default a zoo model's own, and cross_entropy for an ONNX model.",
            ),
            click.option("--target", default="numpy", show_default=True, help="The engine to plan for."),
            click.option("--budget", metavar="SIZE", help="Stay within 2GiB, 512MiB, or a ratio such as 0.5."),
            click.option(
                "--remat",
                type=click.Choice(["off", "free", "auto"]),
                default="free",
                show_default=True,
                help="What may be recomputed to save memory.",
            ),
            click.option(
                "--checkpoint",
                multiple=True,
                metavar="SCOPE",
                help="Recompute this part of the model, and nothing else: layer1, or 'h.*' for h.0, h.1 and so on each "
                "by itself, or conv2..conv5; may be given again.",
            ),
            click.option(
                "--accumulate",
                type=click.IntRange(min=1),
                default=1,
                show_default=True,
                metavar="K",
                help="Run K micro-batches, each of the batch, and update once with their mean gradients.",
            ),
            click.option(
                "--offload",
                is_flag=True,
                help="Copy activations to host memory and back where that takes less time than to recompute them.",
            ),
            click.option(
                "--prefetch",
                is_flag=True,
                help="Plan a second slot for inputs, into which a card copies the next batch while a step runs.",
            ),
            click.option(
                "--tune",
                is_flag=True,
                help="Choose kernels by measuring each once on this machine, and keep what was measured.",
            ),
            click.option(
                "--workspace",
                metavar="SIZE",
                default="auto",
                show_default=True,
                help="The most scratch memory of one action where a kernel with less exists; unlimited; or auto: "
                "64MiB, or more where that is 1.5 times as fast.",
            ),
            click.option(
                "--precision",
                default="float32",
                show_default=True,
                metavar="float32|bf16|fp16",
                help="Compute in bfloat16 or float16; parameters, optimizer state and sums stay float32.",
            ),
            click.option("--output", "outputs", multiple=True, help="Return this output of the model as well."),
        )
    ):
        function = decorator(function)
    return function


def settings_from(options: dict[str, Any]) -> Settings:
    """The settings among a command's parsed options, which are taken out of them."""
    return Settings(
        trust_code=options.pop("trust_code"),
        weights_folder=options.pop("weights_folder"),
        batch=options.pop("batch"),
        shapes=parse_shapes(options.pop("shapes")),
        train=options.pop("train"),
        optimizer=options.pop("optimizer"),
        rate=options.pop("rate"),
        clip_norm=options.pop("clip_norm"),
        loss=options.pop("loss") or "",
        target=options.pop("target"),
        budget=parse_budget(options.pop("budget")),
        remat=options.pop("remat"),
        outputs=tuple(options.pop("outputs")),
        checkpoint=tuple(options.pop("checkpoint")),
        accumulate=options.pop("accumulate"),
        offload=options.pop("offload"),
        prefetch=options.pop("prefetch"),
        precision=options.pop("precision"),
        tune=options.pop("tune"),
        workspace=options.pop("workspace"),
    )


def compile_model(model: str, settings: Settings) -> Compiled:
    """Import or build the model that MODEL names, and compile its step."""
    from foreplan import api, models

    if settings.trust_code or settings.weights_folder is not None:
        raise UsageError(f"{model!r} is no plan file, which --trust-code and --weights-folder are for: leave them out")
    if settings.accumulate > 1 and not settings.train:
        raise UsageError("--accumulate adds up gradients, and there are none with --infer: leave one of them out")
    if settings.offload and not settings.train:
        raise UsageError("--offload copies what the backward pass reads, and --infer has none: leave one of them out")
    with working(f"compiling {model}"):
        if is_file(model):
            graph = api.from_onnx(model, shapes=settings.shapes, batch=settings.batch)
            default = "cross_entropy"
        else:
            if settings.shapes:
                base = model.partition(":")[0]
                raise UsageError(f"--shapes is for ONNX files; a zoo model takes sizes in its name: {base}:batch=32")
            name = with_batch(model, settings.batch)
            graph, default = models.build(name), models.default_loss(name)
        if settings.train:
            from foreplan.frontend.losses import attach_loss

            graph = attach_loss(graph, settings.loss or default, [next(iter(graph.outputs))])
        return api.compile(
            graph,
            optimizer=make_optimizer(settings) if settings.train else None,
            target=settings.target,
            budget=settings.budget,
            remat=settings.remat,
            outputs=settings.outputs or None,
            checkpoint=settings.checkpoint,
            accumulate=settings.accumulate,
            offload=settings.offload,
            prefetch=settings.prefetch,
            precision=settings.precision,
            tune=settings.tune,
            workspace=settings.workspace,
        )


def make_optimizer(settings: Settings) -> Optimizer:
    """The optimizer that the settings name."""
    from foreplan import optim

    kind = getattr(optim, OPTIMIZERS[settings.optimizer])
    made: Optimizer = kind(learning_rate=settings.rate, clip_norm=settings.clip_norm)
    return made


def given(*names: str) -> list[str]:
    """Which of a command's parameters the user has written, as against their defaults."""
    context = click.get_current_context()
    return [n for n in names if context.get_parameter_source(n) is click.core.ParameterSource.COMMANDLINE]


def is_file(text: str) -> bool:
    """Whether MODEL means a file: an ONNX model's name, or anything that is there and not named like a zoo model."""
    from foreplan import models

    return text.endswith(".onnx") or (text.partition(":")[0] not in models.names() and os.path.exists(text))


def is_plan_file(text: str) -> bool:
    """Whether FILE|MODEL means a plan file: by its name, or by its first byte, with which no ONNX model begins."""
    if not is_file(text) or not os.path.isfile(text) or text.endswith(".onnx"):
        return False
    with open(text, "rb") as file:
        return text.endswith(".plan") or file.read(1) == b"{"


def open_compiled(text: str, settings: Settings) -> Compiled:
    """The compiled step of a plan file, or of a model."""
    if is_plan_file(text):
        from foreplan import api

        if written := given(*DECIDED):
            option = f"--{written[0].replace('_', '-')}"
            raise UsageError(f"{text!r} is a plan, which has decided on {option} already: give the model instead")
        return api.load_plan(text, trust_code=settings.trust_code, weights_folder=settings.weights_folder)
    return compile_model(text, settings)


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text. It may hold names from files that nobody trusts: what would steer a terminal is written out."""
    click.echo(_STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text), err=err, nl=nl)


def print_json(data: Any) -> None:
    """One object on standard output; what JSON has no number for (nan, inf) becomes null."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta["printed"] = True  # an error that comes later prints no second object
    echo(json.dumps(_finite(data), indent=2))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and data - data != 0 else data


def say(text: str) -> None:
    """A line for people on standard error, only where that is a terminal."""
    if sys.stderr.isatty():
        echo(text, err=True)


def console() -> rich.console.Console:
    """For progress: standard error, silent where that is not a terminal."""
    from rich.console import Console

    return Console(stderr=True, quiet=not sys.stderr.isatty())


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner on standard error while the block runs, only where that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.markup import escape

    with console().status(escape(text)):
        yield
