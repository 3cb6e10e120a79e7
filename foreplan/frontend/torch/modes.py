"""Training mode and evaluation mode of a module, and who asks which of them it is in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MAKERS = ("torch.nn.modules.module", "torch.fx.", "torch.export.", "torch._export.")  # of modules, whose mode they set


@contextlib.contextmanager
def in_mode(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """The module in evaluation mode as a whole; or in training mode, if it is not already: its parts may differ."""
    modes = {part: part.training for part in module.modules()}
    try:
        if not training or not module.training:
            module.train(training)
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextlib.contextmanager
def askers(module: torch.nn.Module) -> Iterator[set[CodeType | None]]:
    """While the body runs, notes the code that asks for the mode of a module's part, or changes it; None: that of
    another module, which may be a copy.
    """
    import torch

    found: set[CodeType | None] = set()
    own = {id(part) for part in module.modules()}

    def note(part: Any) -> None:
        frame = sys._getframe(2)
        if id(part) in own:
            found.add(frame.f_code)
        elif not frame.f_globals.get("__name__", "").startswith(_MAKERS):
            found.add(None)

    def ask(part: Any) -> Any:
        note(part)
        try:
            return part.__dict__["training"]
        except KeyError:
            raise AttributeError(f"{type(part).__name__!r} object has no attribute 'training'") from None

    def tell(part: Any, mode: bool) -> None:
        note(part)
        part.__dict__["training"] = mode

    kind: Any = torch.nn.Module
    kind.training = property(ask, tell)  # comes before what instances have
    try:
        yield found
    finally:
        del kind.training


def has_one_form(module: torch.nn.Module, asked: set[CodeType | None]) -> bool:
    """Whether a module does the same in both modes but for what PyTorch's own layers tell their ops.

    Args:
        asked: the code that asked for the mode while the module ran in training mode.
    """
    return asked <= _layers() and all(_is_seen(part) and _has_one_form(part) for part in module.modules())


@cache
def _layers() -> set[CodeType | None]:
    """The code of PyTorch's layers that only hand the mode on to an op, or as `_has_one_form` says."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    kinds: Any = (*dropouts, nn.RReLU, nn.RNN, nn.LSTM, nn.GRU, _BatchNorm)
    return {kind.forward.__code__ for kind in kinds}


def _is_seen(part: torch.nn.Module) -> bool:
    """Whether nothing of a module but `training` says its mode, and `askers` sees who reads that."""
    import torch

    kinds = type(part).__mro__
    base = kinds.index(torch.nn.Module)
    hidden = ("training", "train", "eval", "__getattribute__")
    own = part.__dict__.keys() & {"train", "eval"}
    return (
        not own
        and torch.jit.ScriptModule not in kinds
        and not any(name in vars(kind) for kind in kinds[:base] for name in hidden)
    )


def _has_one_form(part: torch.nn.Module) -> bool:
    """Of batch normalisation: it keeps statistics, or has none, whatever the mode."""
    from torch.nn.modules.batchnorm import _BatchNorm

    if not isinstance(part, _BatchNorm):
        return True
    return part.track_running_stats == (part.running_mean is not None) == (part.running_var is not None)
