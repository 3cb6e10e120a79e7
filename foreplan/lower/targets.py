"""The engines, by name: where each is, and what is known of it before it is loaded. No other file has a list of
them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from foreplan.base.arguments import choice, shown
from foreplan.base.errors import TargetError, UsageError
from foreplan.lower.target import Target


@dataclass(frozen=True)
class EngineInfo:
    """An engine.

    Attributes:
        package: its modules, loaded when they are asked for: `target` with `target(options, tune)`, `engine` with
            `engine(program, capture)`, `outside` with `outside(program, plan, use)`, and of a card `lacking` with
            `lacking(program)` and `workspaces` with `asked(target, tf32)`.
        on_card: whether its arena lies in a card's memory, apart from the host's.
        falls_back: whether its target gives NumPy's kernels where it has none of its own; plans then note which.
        loops: whether it runs the body of a loop again and again; else loops are written out.
        transforms: whether some of its kernels multiply sums of numbers instead of the numbers, as Winograd's do; a
            target with the option `strict` has none of these.
    """

    package: str
    on_card: bool = False
    falls_back: bool = False
    loops: bool = False
    transforms: bool = False

    def module(self, name: str) -> Any:
        """One of its modules."""
        return importlib.import_module(f"{self.package}.{name}")


ENGINES = {
    "numpy": EngineInfo("foreplan.runtime.numpy", loops=True),
    "cpu": EngineInfo("foreplan.runtime.cpu", falls_back=True, loops=True, transforms=True),
    "cuda": EngineInfo("foreplan.runtime.cuda", on_card=True, transforms=True),
}
AUTO = "auto"  # the target by default: this machine's processor by the fastest engine that is installed
ACCURACIES = ("default", "strict")
STRICT = "strict"  # the option of targets that leaves out such kernels
_UNKNOWN = EngineInfo("")


@lru_cache(maxsize=1)
def why_numpy() -> str:
    """Why the target `auto` is numpy on this machine; empty where it is cpu."""
    try:
        ENGINES["cpu"].module("machine").this_machine()
    except TargetError as error:
        return f"the target is numpy, whose steps take 2 to 28 times as long: {error}"
    return ""


def resolved(target: str) -> str:
    """The name of a target: `cpu` for `auto` where oneDNN is there, and `numpy` where it is not."""
    return target if target != AUTO else "numpy" if why_numpy() else "cpu"


def engine_info(target: str) -> EngineInfo:
    """What is known of the engine of a target, such as `cpu:threads=2`; an empty record for a user's own target."""
    return ENGINES.get(resolved(target).partition(":")[0], _UNKNOWN)


def options_of(target: str) -> str:
    """The options behind the engine's name."""
    return target.partition(":")[2]


def target_named(text: str, *, tune: bool = False, accuracy: str = "default") -> Target:
    """The target of that name, perhaps with options: `auto`, `numpy`, `cpu`, `cpu:threads=2`, `cuda:h100`.

    Args:
        tune: whether it measures its kernels on this machine.
        accuracy: `strict` leaves out kernels whose sums are not those of the products of the numbers themselves.

    Raises:
        UsageError: there is no such target, it has no such option, or it cannot measure.
    """
    if not isinstance(text, str):
        raise UsageError(f"a target is one of {', '.join(ENGINES)}, such as 'cpu:threads=2', and is {shown(text)}")
    name, _, options = resolved(text).partition(":")
    choice("target", name, tuple(ENGINES))
    info = ENGINES[name]
    if choice("accuracy", accuracy, ACCURACIES) == "strict" and info.transforms and STRICT not in options.split(","):
        options = f"{options},{STRICT}" if options or info.on_card else STRICT
    return cast(Target, info.module("target").target(options, tune))


def chosen_target(target: str | Target, *, tune: bool = False, accuracy: str = "default") -> Target:
    """The target of a name, as `target_named` makes it; or one that has been made, as it is.

    Raises:
        UsageError: as `target_named`; or accuracy is asked of a target that has been made.
    """
    if isinstance(target, str) or not hasattr(target, "kernels"):
        return target_named(cast(str, target), tune=tune, accuracy=accuracy)
    if accuracy != ACCURACIES[0]:
        raise UsageError(f"accuracy={accuracy!r} is for a target by name, such as 'cpu', not for {target!r}")
    return target
