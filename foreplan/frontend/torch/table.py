"""The table of ATen ops: what each becomes on traced tensors. The modules of `ops/` fill it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

Handler = Callable[..., Any]
Given = TypeVar("Given", bound=Handler)
_MODULES = (
    *("attention", "elementwise", "fourier", "gradients", "indices", "layers", "losses", "products"),
    *("quantized", "random", "recurrent", "reductions", "shapes", "special", "systems", "vision"),
)


@dataclass(frozen=True)
class Entry:
    """One op.

    Attributes:
        handler: from a call and the op's arguments to its result: tensors, arrays, or a list of them.
        views: whether the result is a view, so that what is written into one is written into the other.
        draws: whether it draws random numbers, so that it is never computed while importing.
        along: whether it goes along an axis, for which PyTorch takes a number as a row of one.
    """

    handler: Handler
    views: bool = False
    draws: bool = False
    along: bool = False


_TABLE: dict[str, Entry] = {}


def aten(*names: str, **what: bool) -> Callable[[Given], Given]:
    """Make a function the handler of ATen ops; an op in place has the name without `_` unless that is another op.

    Args:
        names: of the ops.
        what: fields of `Entry`.
    """

    def add(handler: Given) -> Given:
        for name in names:
            assert name not in _TABLE, name
            _TABLE[name] = Entry(handler, **what)
        return handler

    return add


@cache
def table() -> dict[str, Entry]:
    """All ops that are known, by name."""
    for module in _MODULES:
        importlib.import_module(f"foreplan.frontend.torch.ops.{module}")
    return _TABLE


def entry(name: str) -> Entry | None:
    """What is known of an op."""
    known = table()
    return known.get(name) or known.get(name.removesuffix("_"))
