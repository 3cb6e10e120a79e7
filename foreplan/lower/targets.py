"""The engines, by name: where each is, and what is known of it before it is loaded. No other file has a list of
them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, cast

from foreplan.arguments import choice, shown
from foreplan.errors import UsageError
from foreplan.lower.target import Target


@dataclass(frozen=True)
class EngineInfo:
    """An engine.

    Attributes:
        package: its modules, loaded when they are asked for: `target` with `target(options, tune)`, `engine` with
            `engine(program, capture)`, `outside` with `outside(program, plan, use)`, and of a card `lacking` with
            `lacking(program)` and `workspaces` with `asked(target, tf32)`.
        on_card: whether its arena lies in a card's memory, apart from the host's.
        falls_back: whether NumPy's kernels stand in for kernels that it lacks.
        loops: whether it runs the body of a loop again and again; else loops are written out.
    """

    package: str
    on_card: bool = False
    falls_back: bool = False
    loops: bool = False

    def module(self, name: str) -> Any:
        """One of its modules."""
        return importlib.import_module(f"{self.package}.{name}")


ENGINES = {
    "numpy": EngineInfo("foreplan.runtime.numpy", loops=True),
    "cpu": EngineInfo("foreplan.runtime.cpu", falls_back=True, loops=True),
    "cuda": EngineInfo("foreplan.runtime.cuda", on_card=True),
}
_UNKNOWN = EngineInfo("")


def engine_info(target: str) -> EngineInfo:
    """What is known of the engine of a target, such as `cpu:threads=2`; an empty record for a user's own target."""
    return ENGINES.get(target.partition(":")[0], _UNKNOWN)


def options_of(target: str) -> str:
    """The options behind the engine's name."""
    return target.partition(":")[2]


def target_named(text: str, *, tune: bool = False) -> Target:
    """The target of that name, perhaps with options: `numpy`, `cpu`, `cpu:threads=2`, `cuda:h100`.

    Args:
        tune: whether it measures its kernels on this machine.

    Raises:
        UsageError: there is no such target, it has no such option, or it cannot measure.
    """
    if not isinstance(text, str):
        raise UsageError(f"a target is one of {', '.join(ENGINES)}, such as 'cpu:threads=2', and is {shown(text)}")
    choice("target", text.partition(":")[0], tuple(ENGINES))
    return cast(Target, engine_info(text).module("target").target(options_of(text), tune))
