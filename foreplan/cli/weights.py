"""Options for the file of weights that a command starts from, and for how its names differ from the model's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from foreplan.base.errors import UsageError
from foreplan.cli.flags import Grouped, given
from foreplan.cli.options import echo

if TYPE_CHECKING:
    from foreplan.runtime.session import Session

_Function = TypeVar("_Function", bound=Callable[..., Any])
_option = partial(click.option, cls=Grouped, group="Weights")
_OPTIONS = {
    "partial": _option(
        "--partial",
        is_flag=True,
        help="Load the weights that --weights has, and convert or transpose them if they only fit so.",
    ),
    "prefix": _option("--prefix", metavar="TEXT", help="Drop this prefix from the names in --weights."),
    "rename": _option(
        "--rename",
        multiple=True,
        metavar="PART=NEW",
        help="Rename a part of the names in --weights to the model's name; may be given again.",
    ),
    "transpose": _option(
        "--transpose",
        multiple=True,
        metavar="PATTERN",
        help="Transpose these matrices of --weights; may be given again.",
    ),
    "skip": _option(
        "--skip", multiple=True, metavar="PATTERN", help="Do not load these weights from --weights; may be given again."
    ),
}


def weights_options(function: _Function) -> _Function:
    """`--weights`, and how to read it."""
    for decorator in reversed(_OPTIONS.values()):
        function = decorator(function)
    what = "Load parameters and running statistics, written by `train` or another tool."
    return _option("--weights", metavar="W.safetensors", help=what)(function)


def load_weights(session: Session, path: str | None, options: dict[str, Any]) -> None:
    """Read the file of `--weights`, if there is one, and print what was not taken as it stood there.

    Args:
        session: the values to write.
        path: of the file.
        options: the command's parsed options; those that say how to read it are taken out.

    Raises:
        UsageError: options for a file that is not given, or one that is no name and its new name.
        SessionError: see `Session.load`.
    """
    how = {name: options.pop(name) for name in _OPTIONS}
    if path is None:
        if written := given(*_OPTIONS):
            raise UsageError(f"--{written[0]} says how to read --weights: give the file too")
        return
    pairs = dict(_pair(text) for text in how["rename"])
    loaded = session.load(
        path,
        state=False,
        strict=not how["partial"],
        prefix=how["prefix"] or "",
        rename=pairs,
        transpose=how["transpose"],
        skip=how["skip"],
    )
    if loaded.missing or loaded.unexpected or loaded.transposed or loaded.converted:
        echo(f"{path}: {loaded}", err=True)


def _pair(text: str) -> tuple[str, str]:
    part, equals, new = text.partition("=")
    if not equals:
        raise UsageError(f"--rename takes PART=NEW, such as fc=head, and was given {text!r}")
    return part, new
