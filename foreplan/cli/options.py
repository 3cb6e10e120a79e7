"""What the commands share: the options that choose a model and its step, and what they print to whom."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from foreplan.base import once
from foreplan.base.errors import UsageError
from foreplan.cli.data import read_array
from foreplan.cli.optimizer import OPTIMIZERS, SCHEDULES
from foreplan.options import USUAL, Options
from foreplan.options import checks as option_checks
from foreplan.options.fields import Said, said_of

if TYPE_CHECKING:
    import rich.console

# Control characters but line ends and tabs, those that turn the direction of writing, and bytes of paths that are no
# text: as JSON writes them.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MODEL_FILES = (".onnx", ".pt2")
LOSSES = (
    "cross_entropy",
    "nll",
    "binary_cross_entropy",
    "mse",
    "l1",
    "huber",
    "kl_div",
    "mean",
    "sum",
)  # of one output
# Parameters of commands that a plan file leaves no choice about; the learning rate is an input of the step.
FLAGS = {each.name: said_of(each) for each in fields(Options) if said_of(each).flag}
DECIDED: tuple[str, ...] = (
    "batch",
    "shapes",
    "values",
    "infer",
    "optimizer",
    "schedule",
    "clip_norm",
    "clip_value",
    "weight_decay",
    "decay",
)
DECIDED += ("loss", "lora", "rank", "alpha", "dora", *FLAGS)
_Function = TypeVar("_Function", bound=Callable[..., Any])


threads_option = click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads of a step.")
seed_option = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
values_option = click.option(
    "--values", multiple=True, metavar="AXES=[0,1]", help="Value of an input that decides shapes; may be given again."
)
deadline_option = click.option(
    "--deadline",
    type=click.FloatRange(min=0.001, max=1e9),
    metavar="SECONDS",
    help="How long ranks wait for one another before the job ends: 600.",
)
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
        values: input name → the values that it has in every step.
        infer: the forward pass alone, as against the whole training step.
        optimizer: a key of OPTIMIZERS, with parameters behind a colon if any.
        rate: learning rate; with a schedule, the one that it begins with or rises to.
        schedule: one of SCHEDULES, with parameters behind a colon if any; None: the rate stays.
        clip_norm: what the norm of all gradients together is limited to; None: nothing.
        clip_value: what each element of a gradient is limited to; None: nothing.
        weight_decay: None: the optimizer's own.
        decay: what weight decay shrinks: all, or matrices.
        loss: one of LOSSES; None: that of a zoo model, cross-entropy for any other.
        lora: patterns of weights that get adapters; none: the model has none.
        rank, alpha: of the adapters; None: those that `foreplan.lora` has by default.
        dora: whether the adapters have magnitudes.
        step: the other options of `compile`.
        trust_code: whether machine code in a plan file may run.
        weights_folder: where the weights that a plan file names are; None: beside it.
    """

    batch: int | None = None
    shapes: dict[str, tuple[int, ...]] | None = None
    values: dict[str, Any] | None = None
    infer: bool = False
    optimizer: str = "nesterov"
    rate: float = 0.01
    schedule: str | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    weight_decay: float | None = None
    decay: str = "all"
    loss: str | None = None
    lora: tuple[str, ...] = ()
    rank: int | None = None
    alpha: float | None = None
    dora: bool = False
    step: Options = USUAL
    trust_code: bool = False
    weights_folder: str | None = None


def with_threads(target: str, threads: int | None) -> tuple[str, int | None]:
    """The target with threads that a plan for it depends on, and those that are left to binding."""
    from foreplan.lower.targets import resolved

    return (f"cpu:threads={threads}", None) if threads and resolved(target) == "cpu" else (target, threads)


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


def parse_values(texts: tuple[str, ...]) -> dict[str, Any] | None:
    """Values by input name, from texts such as `axes=[0, 1]` or `axes=axes.npy`.

    Raises:
        UsageError: a text is no value, or a name comes twice.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, written = text.partition("=")
        if not equals or not name or not written:
            raise UsageError(f"{text!r} is no value of an input; write name=[numbers], or name=FILE.npy")
        if name in values:
            raise UsageError(f"the value of {name!r} is given twice")
        values[name] = read_array(written) if written.endswith(".npy") else _numbers(written, text)
    return values or None


def _numbers(written: str, text: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        raise UsageError(f"{text!r} holds no number and no list of numbers; write one such as axes=[0, 1]") from None


def model_options(function: _Function) -> _Function:
    """MODEL and everything that says how to make a step of it."""
    return model_options_without()(function)


def model_options_without(*left_out: str) -> Callable[[_Function], _Function]:
    """The same, but for some options of `compile`, which a command has in a form of its own."""

    def decorate(function: _Function) -> _Function:
        for decorator in reversed(_model_options(left_out)):
            function = decorator(function)
        return function

    return decorate


def _model_options(left_out: Collection[str]) -> tuple[Callable[[_Function], _Function], ...]:
    return (
        click.argument("model"),
        plan_file_options,
        click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Extent of the batch axis."),
        click.option(
            "--shapes", multiple=True, metavar="X:32x3x224x224", help="Shape of an input; may be given again."
        ),
        values_option,
        click.option("--infer", is_flag=True, help="The forward pass alone, instead of the whole training step."),
        click.option(
            "--optimizer",
            default="nesterov",
            show_default=True,
            metavar="NAME[:KEY=VALUE,…]",
            help=f"One of {', '.join(OPTIMIZERS)}; its parameters may follow, as in adamw:beta2=0.95,ema=0.999.",
        ),
        click.option("--lr", "rate", type=float, default=0.01, show_default=True, help="Learning rate."),
        click.option(
            "--schedule",
            metavar="NAME[:KEY=VALUE,…]",
            help=f"How the learning rate follows from the step: one of {', '.join(SCHEDULES)}, such as "
            "cosine:steps=1000,warmup=50.",
        ),
        click.option("--clip-norm", type=float, metavar="X", help="Scale gradients down to this norm of all together."),
        click.option("--clip-value", type=float, metavar="X", help="Limit each element of gradients to [-X, X]."),
        click.option("--weight-decay", type=float, metavar="X", help="By default the optimizer's own."),
        click.option(
            "--decay",
            type=click.Choice(["all", "matrices"]),
            default="all",
            show_default=True,
            help="What weight decay shrinks: all weights, or those with two axes or more.",
        ),
        click.option(
            "--loss",
            type=click.Choice(LOSSES),
            help="On the first output. By default a zoo model's own; of any other that output itself where it is one "
            "number, and else cross_entropy.",
        ),
        click.option(
            "--lora",
            multiple=True,
            metavar="PATTERN",
            help="Freeze all weights, and train low-rank adapters of these; may be given again.",
        ),
        click.option("--rank", type=click.IntRange(min=1), metavar="N", help="Of the adapters of --lora: 8."),
        click.option("--alpha", type=float, metavar="X", help="Their strength, times the rank: 16."),
        click.option("--dora", is_flag=True, help="Train the norms of the adapted weights, too."),
        *(_option(name, said) for name, said in FLAGS.items() if name not in left_out),
    )


def _option(name: str, said: Said) -> Callable[[_Function], _Function]:
    """An option of `compile` as a flag."""
    default = getattr(USUAL, name)
    if isinstance(default, bool):
        return click.option(said.flag, name, is_flag=True, help=said.help)
    if isinstance(default, tuple) or said.check is option_checks.some_names:
        text = said.help.removesuffix(".") + "; may be given again."
        return click.option(said.flag, name, multiple=True, metavar=said.value, help=text)
    kind: Any = str
    if said.choices:
        kind = click.Choice(said.choices)
    elif said.least is not None:
        kind = _Whole(said.least, said.words)
    return click.option(
        said.flag, name, type=kind, default=default, show_default=True, metavar=said.value or None, help=said.help
    )


class _Whole(click.ParamType):
    """A whole number, or a word that stands for one."""

    name = "whole"

    def __init__(self, least: int, words: tuple[str, ...]) -> None:
        self.number, self.words = click.IntRange(min=least), words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word, or the number."""
        return value if value in self.words else self.number.convert(value, param, ctx)


def settings_from(options: dict[str, Any]) -> Settings:
    """The settings among a command's parsed options, which are taken out of them."""
    step = Options(**{name: value for name in FLAGS if (value := options.pop(name)) != ()})
    own = {each.name: options.pop(each.name) for each in fields(Settings) if each.name != "step"}
    parsed = {"shapes": parse_shapes(own["shapes"]), "values": parse_values(own["values"])}
    return Settings(**own | parsed, step=step)


def given(*names: str) -> list[str]:
    """Which of a command's parameters the user has written, as against their defaults."""
    context = click.get_current_context()
    return [n for n in names if context.get_parameter_source(n) is click.core.ParameterSource.COMMANDLINE]


def is_file(text: str) -> bool:
    """Whether MODEL means a file: by its name, or anything that is there and not named like a zoo model."""
    from foreplan import models

    return text.endswith(MODEL_FILES) or (text.partition(":")[0] not in models.names() and os.path.exists(text))


def is_plan_file(text: str) -> bool:
    """Whether FILE|MODEL means a plan file: by its name, or by its first byte, with which no model begins."""
    if not is_file(text) or not os.path.isfile(text) or text.endswith(MODEL_FILES):
        return False
    with open(text, "rb") as file:
        return text.endswith(".plan") or file.read(1) == b"{"


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
    """A spinner on standard error while the block runs, only where that is a terminal.

    While functions are compiled, it counts them. How many a plan needs is not known before it is found: the searches
    that run depend on the problem, and so do the types that they run on.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.markup import escape

    done: Counter[str] = Counter()

    with console().status(escape(text)) as status:

        def tell(what: str) -> None:
            done[what] += 1
            status.update(
                escape(f"{text}: compiling {what} for this machine, once, some seconds: function {done[what]}")
            )

        once.listeners.append(tell)
        try:
            yield
        finally:
            once.listeners.remove(tell)
