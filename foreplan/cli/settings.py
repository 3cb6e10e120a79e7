"""How a command makes a step of a model: the options of `compile`, and what the command line adds to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from foreplan.base.arguments import flag, names_in, shown, whole
from foreplan.base.errors import UsageError
from foreplan.cli.optimizer import OPTIMIZERS, SCHEDULES, optimizer_text, schedule_text
from foreplan.options import USUAL, Options
from foreplan.options import checks as option_checks
from foreplan.options.fields import grouped, info_of, keep_checked

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
_model, _training, _adapters, _plan = map(grouped, ("Model", "Training", "Adapters", "Plan files"))


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]] | None:
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


def _shapes(name: str, value: Any) -> Any:
    """Shapes by input name: a mapping, or texts."""
    if not isinstance(value, Mapping):
        return parse_shapes(names_in(name, value))
    for key, extents in value.items():
        if not isinstance(extents, list | tuple):
            raise UsageError(f"{name} of {key!r} must be a list of whole numbers, and is {shown(extents)}")
    return {key: tuple(whole(f"{name} of {key!r}", n, 0) for n in extents) for key, extents in value.items()} or None


def parse_values(texts: Iterable[str]) -> dict[str, Any] | None:
    """Values by input name, from texts such as `axes=[0, 1]` or `axes=axes.npy`; of a file, its name.

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
        values[name] = written if written.endswith(".npy") else _numbers(written, text)
    return values or None


def _values(name: str, value: Any) -> Any:
    """Values by input name, from a mapping or from texts such as `axes=[0, 1]`: numbers, lists of them, or the names
    of .npy files.
    """
    if not isinstance(value, Mapping):
        return parse_values(names_in(name, value))
    for key, each in value.items():
        if not (each.endswith(".npy") if isinstance(each, str) else _is_numbers(each)):
            raise UsageError(f"{name} of {key!r} must be numbers or the name of an .npy file, and is {shown(each)}")
    return dict(value) or None


def _numbers(written: str, text: str) -> Any:
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        found = None
    if not _is_numbers(found):
        raise UsageError(f"{text!r} holds no number and no list of numbers; write one such as axes=[0, 1]")
    return found


def _is_numbers(value: Any) -> bool:
    """Whether it is a number, or lists of them however deep."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif not isinstance(each, int | float):
            return False
    return True


def _values_files(value: Any, place: Callable[[str], str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: place(each) if isinstance(each, str) else each for key, each in value.items()}


def _some_text(name: str, value: Any) -> Any:
    return None if value is None else option_checks.text(name, value)


@dataclass(frozen=True)
class Settings:
    """How to make a step of a model, as the command line says it.

    Attributes:
        step: the options of `compile`, without loss and optimizer.

    Raises:
        UsageError: a value that an option does not take.
    """

    batch: int | None = field(
        default=None, metadata=_model("The extent of the batch axis.", flag="--batch", value="N", least=1)
    )
    shapes: dict[str, tuple[int, ...]] | None = field(
        default=None,
        metadata=_model("The shape of an input.", flag="--shapes", value="X:32x3x224x224", check=_shapes, several=True),
    )
    values: dict[str, Any] | None = field(
        default=None,
        metadata=_model(
            "The value of an input that decides shapes.",
            flag="--values",
            value="AXES=[0,1]",
            check=_values,
            files=_values_files,
            several=True,
        ),
    )
    infer: bool = field(
        default=False,
        metadata=_model("Plan the forward pass alone, not the whole training step.", flag="--infer", check=flag),
    )
    loss: str | None = field(
        default=None,
        metadata=_training(
            "The loss of the first output. By default a zoo model's own; for other models the output itself if it is "
            "one number, and cross_entropy if not.",
            flag="--loss",
            choices=LOSSES,
        ),
    )
    optimizer: str = field(
        default="nesterov",
        metadata=_training(
            f"One of {', '.join(OPTIMIZERS)}, with parameters if any, such as adamw:beta2=0.95,ema=0.999.",
            flag="--optimizer",
            value="NAME[:KEY=VALUE,…]",
            check=optimizer_text,
        ),
    )
    rate: float = field(
        default=0.01,
        metadata=_training(
            "The learning rate; with a schedule, its first or highest rate.",
            flag="--lr",
            check=option_checks.number,
        ),
    )
    schedule: str | None = field(
        default=None,
        metadata=_training(
            f"How the learning rate changes: one of {', '.join(SCHEDULES)}, such as cosine:steps=1000,warmup=50.",
            flag="--schedule",
            value="NAME[:KEY=VALUE,…]",
            check=schedule_text,
        ),
    )
    clip_norm: float | None = field(
        default=None,
        metadata=_training(
            "Scale all gradients down so that their joint norm is at most X.",
            flag="--clip-norm",
            value="X",
            check=option_checks.number,
        ),
    )
    clip_value: float | None = field(
        default=None,
        metadata=_training(
            "Limit each element of gradients to [-X, X].", flag="--clip-value", value="X", check=option_checks.number
        ),
    )
    weight_decay: float | None = field(
        default=None,
        metadata=_training(
            "How much weights shrink in a step; by default the optimizer's own.",
            flag="--weight-decay",
            value="X",
            check=option_checks.number,
        ),
    )
    decay: str = field(
        default="all",
        metadata=_training(
            "What weight decay shrinks: all weights, or those with two axes or more.",
            flag="--decay",
            choices=("all", "matrices"),
        ),
    )
    lora: Iterable[str] = field(
        default=(),
        metadata=_adapters(
            "Freeze all weights, and train low-rank adapters of these.",
            flag="--lora",
            value="PATTERN",
            check=option_checks.names,
        ),
    )
    rank: int | None = field(
        default=None, metadata=_adapters("The rank of the adapters: 8.", flag="--rank", value="N", least=1)
    )
    alpha: float | None = field(
        default=None,
        metadata=_adapters(
            "The adapters' strength, times the rank: 16.", flag="--alpha", value="X", check=option_checks.number
        ),
    )
    dora: bool = field(
        default=False,
        metadata=_adapters("Also train the norms of the adapted weights (DoRA).", flag="--dora", check=flag),
    )
    step: Options = USUAL
    trust_code: bool = field(
        default=False,
        metadata=_plan(
            "Run the machine code for a card in a plan file.", flag="--trust-code", check=flag, in_files=False
        ),
    )
    weights_folder: str | None = field(
        default=None,
        metadata=_plan(
            "The folder of the weights that a plan file names; by default the plan's own.",
            flag="--weights-folder",
            value="DIR",
            check=_some_text,
            in_files=False,
        ),
    )

    def __post_init__(self) -> None:
        keep_checked(self)


def _with_flag(kind: type) -> dict[str, Field[Any]]:
    return {each.name: each for each in fields(kind) if "info" in each.metadata and info_of(each).flag}


OF_STEP, OF_MODEL = _with_flag(Options), _with_flag(Settings)
# Each is a flag; loss and optimizer are those of `Settings`. What no file can say comes last.
FIELDS = dict(sorted((OF_MODEL | OF_STEP).items(), key=lambda item: not info_of(item[1]).in_files))
