"""What the commands share: what MODEL means, some options, and what they print to whom."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from foreplan.base import once

if TYPE_CHECKING:
    import rich.console

# Control characters but line ends and tabs, those that turn the direction of writing, and bytes of paths that are no
# text: as JSON writes them.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MODEL_FILES = (".onnx", ".pt2")


threads_option = click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="How many threads a step uses."
)
seed_option = click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of weights, random masks and the order of samples.",
)
deadline_option = click.option(
    "--deadline",
    type=click.FloatRange(min=0.001, max=1e9),
    metavar="SECONDS",
    help="How long ranks wait for one another before the job ends; by default 600.",
)


def with_threads(target: str, threads: int | None) -> tuple[str, int | None]:
    """The target with threads that a plan for it depends on, and those that are left to binding."""
    from foreplan.lower.targets import resolved

    return (f"cpu:threads={threads}", None) if threads and resolved(target) == "cpu" else (target, threads)


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
