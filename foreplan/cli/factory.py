"""MODEL as `package.module:make`: a function of the user's that makes a PyTorch module and its example."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from foreplan.base.arguments import shown
from foreplan.base.errors import ForeplanError, UsageError
from foreplan.cli.options import is_file

_FACTORY = re.compile(r"[^\W\d][\w./]*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_GIVES = "(module, example), (module, args, kwargs), an exported program or a graph"


@dataclass(frozen=True)
class Made:
    """What a user's function made.

    Attributes:
        model: a `torch.nn.Module`, a `torch.export.ExportedProgram`, or a graph.
        args, kwargs: what the module is called with; a program or graph has none.
        takes_batch: whether the function was told the batch.
        is_graph: whether the model is a graph already.
    """

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    takes_batch: bool = False
    is_graph: bool = False


def is_factory(text: str) -> bool:
    """Whether MODEL means a function of a module of Python, and neither a file nor a model of the zoo."""
    from foreplan import models

    return bool(_FACTORY.fullmatch(text)) and not is_file(text) and text.partition(":")[0] not in models.names()


@lru_cache(maxsize=1)
def made(text: str, batch: int | None = None) -> Made:
    """Import the module of `package.module:make` and call its function. This runs the user's code.

    The current folder is looked at first, as by `python -m`. The last result is kept, so that the graph and whoever
    asks for the module behind it have the same one.

    Args:
        batch: what the function gets as `batch`, if it has a parameter of that name.

    Raises:
        UsageError: there is no such module or function, its code fails (names its line), or it gives something else.
    """
    from foreplan.graph import Graph

    name, _, path = text.partition(":")
    dotted = name.removesuffix(".py").replace("/", ".")
    if dotted != name:
        raise UsageError(f"{text!r} names a file, where a module is wanted: write {dotted}:{path}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _told(text, name), contextlib.redirect_stdout(sys.stderr):  # standard output has the command's result
        function: Any = importlib.import_module(name)
        for part in path.split("."):
            if not hasattr(function, part):
                raise UsageError(f"{text!r}: {name!r} has no {path!r}")
            function = getattr(function, part)
        ready = isinstance(function, Graph) or hasattr(type(function), "state_dict")  # which are callable, too
        if not ready and not callable(function):
            raise UsageError(f"{text!r}: {path!r} is {shown(function)}, and no function; write one that gives {_GIVES}")
        takes = not ready and batch is not None and _takes_batch(function)
        given = function if ready else function(batch=batch) if takes else function()
    return _made(text, given, takes)


def _takes_batch(function: Callable[..., Any]) -> bool:
    try:
        return "batch" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _made(text: str, given: Any, takes_batch: bool) -> Made:
    """What a function gave, as one form."""
    from foreplan.frontend.torch.exporting import torch_here
    from foreplan.graph import Graph

    if isinstance(given, Graph):
        return Made(given, takes_batch=takes_batch, is_graph=True)

    torch = torch_here()
    if isinstance(given, torch.export.ExportedProgram):
        return Made(given, takes_batch=takes_batch)
    if isinstance(given, torch.nn.Module):
        raise UsageError(
            f"{text!r} gives a module without an example; return (module, example), with tensors of a step"
        )
    parts = tuple(given) if isinstance(given, tuple | list) else ()
    if len(parts) not in (2, 3) or not isinstance(parts[0], torch.nn.Module):
        raise UsageError(f"{text!r} gives {shown(given)}; it must give {_GIVES}")
    module, example, kwargs = parts[0], parts[1], parts[2] if len(parts) == 3 else {}
    if len(parts) == 2 and isinstance(example, Mapping):  # as a tokenizer gives it
        example, kwargs = (), example
    if not isinstance(kwargs, Mapping):
        raise UsageError(f"{text!r} gives {shown(kwargs)} as the arguments by name; give a dictionary")
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    return Made(module, args, dict(kwargs), takes_batch)


@contextlib.contextmanager
def _told(text: str, name: str) -> Iterator[None]:
    """Whatever a user's code raises is an error that names its line."""
    try:
        yield
    except ForeplanError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failure(text, error) from error
        raise UsageError(
            f"{text!r}: there is no module {error.name!r} in the current folder, and none is installed"
        ) from None
    except (Exception, SystemExit) as error:
        raise _failure(text, error) from error


def _failure(text: str, error: BaseException) -> UsageError:
    """An error with the innermost line that is the user's own: of no installed package, and not of Python itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return UsageError(f"{text!r} fails at {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}")
    paths = sysconfig.get_paths()
    others = tuple(os.path.join(paths[key], "") for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<")]
    own = [each for each in frames if not each.filename.startswith((*others, os.path.join(ours, "")))]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    reason = str(error).strip() or "no reason given"
    return UsageError(f"{text!r} fails{where}: {type(error).__name__}: {reason}")
