"""Optimizers and schedules by name, with parameters behind a colon: `adamw:beta2=0.95`, `cosine:steps=1000`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from foreplan.base.arguments import choice, instance
from foreplan.base.errors import UsageError

if TYPE_CHECKING:
    from foreplan.passes.optimizer import Optimizer, Schedule

OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "Momentum",
    "nesterov": "Nesterov",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adafactor": "Adafactor",
    "lion": "Lion",
    "lamb": "LAMB",
    "muon": "Muon",
    "sparse_adam": "SparseAdam",
}
SCHEDULES = ("constant", "linear", "cosine", "polynomial", "staircase", "inverse_sqrt", "one_cycle")
# What has an option of its own, and what one cannot write as a number, yes, no or a word.
_OPTIONS = {
    "learning_rate": "--lr",
    "rate": "--lr",
    "weight_decay": "--weight-decay",
    "decay": "--decay",
    "clip_norm": "--clip-norm",
    "clip_value": "--clip-value",
}
_ONLY_IN_PYTHON = ("groups", "coefficients", "adamw")


def optimizer_text(name: str, value: Any) -> str:
    """The text of an optimizer that there is; its parameters are checked when it is made.

    Raises:
        UsageError: there is none of that name, or what follows is no list of parameters.
    """
    return _named(name, value, OPTIMIZERS)


def schedule_text(name: str, value: Any) -> str:
    """Likewise, of a schedule."""
    return _named(name, value, SCHEDULES)


def _named(what: str, value: Any, known: Iterable[str]) -> str:
    text = instance(what, value, str, "give a name")
    choice(what, _split(f"--{what}", text)[0], known)
    return text


def make_optimizer(text: str, rate: float | Schedule, **options: Any) -> Optimizer:
    """The optimizer that a text such as `muon:momentum=0.9` names.

    Args:
        text: its name, and parameters.
        rate: learning rate.
        options: parameters with an option of their own; those that are None are the optimizer's own.

    Raises:
        UsageError: there is no such optimizer, no such parameter, or no such value of it.
    """
    from foreplan import optim

    name, parameters = _split("--optimizer", text)
    kind = getattr(optim, OPTIMIZERS[choice("optimizer", name, OPTIMIZERS)])
    made: Optimizer = _made("--optimizer", name, kind, parameters, learning_rate=rate, **options)
    return made


def make_rate(schedule: str | None, rate: float) -> float | Schedule:
    """The learning rate, or the schedule that a text such as `cosine:steps=1000,warmup=50` names.

    Raises:
        UsageError: there is no such schedule, no such parameter, or no such value of it; or it needs one more.
    """
    if schedule is None:
        return rate
    from foreplan import optim

    name, parameters = _split("--schedule", schedule)
    make = getattr(optim, choice("schedule", name, SCHEDULES))
    made: Schedule = _made("--schedule", name, make, parameters, rate=rate)
    return made


def with_steps(schedule: str | None, steps: int | None) -> str | None:
    """A schedule's text, that ends with a run of so many steps unless it says another end itself."""
    if schedule is None or steps is None:
        return schedule
    from foreplan import optim

    name, parameters = _split("--schedule", schedule)
    ends = name in SCHEDULES and "steps" in inspect.signature(getattr(optim, name)).parameters
    return schedule if not ends or "steps" in parameters else f"{schedule}{',' if parameters else ':'}steps={steps}"


def _split(option: str, text: str) -> tuple[str, dict[str, str]]:
    name, _, rest = text.partition(":")
    given: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key in given:
            wrong = "is given twice" if equals else "is no parameter; write NAME:key=value,key=value"
            raise UsageError(f"{option} {text!r}: {key!r} {wrong}")
        given[key] = value
    return name.strip(), given


def _made(option: str, name: str, make: Callable[..., Any], texts: Mapping[str, str], **options: Any) -> Any:
    """What a function or a class makes of parameters given as text, and of those with an option of their own."""
    signature = inspect.signature(make).parameters
    known = {key: each for key, each in signature.items() if key not in (*_OPTIONS, *_ONLY_IN_PYTHON)}
    for key in texts:
        if key in _OPTIONS:
            raise UsageError(f"{option} {name}: {key} has an option of its own, {_OPTIONS[key]}")
        if key not in known:
            raise UsageError(f"{option} {name} has no parameter {key!r}; it has {', '.join(known)}")
    needed = [key for key, each in known.items() if each.default is each.empty and key not in texts]
    if needed:
        raise UsageError(f"{option} {name} needs {needed[0]}: write {name}:{needed[0]}=NUMBER")
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in signature:
            raise UsageError(f"{name} has no {key.replace('_', ' ')}: leave {_OPTIONS[key]} out")
    return make(**given, **{key: _literal(text) for key, text in texts.items()})


def _literal(text: str) -> float | bool | str:
    """A number, yes or no, or a word."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
