"""Losses and optimizers that foreplan names, as PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from foreplan.base.errors import UsageError
from foreplan.frontend.losses import LOSSES, Loss
from foreplan.frontend.losses.classes import CrossEntropy, NegativeLogLikelihood
from foreplan.frontend.losses.elements import BinaryCrossEntropy, Huber, MeanAbsoluteError, MeanSquaredError
from foreplan.frontend.losses.results import Mean, Sum

LossOf = Callable[..., torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def _classes(function: LossOf) -> LossOf:
    """Of scores; of more than two axes the classes lie last, and items are put side by side."""

    def of(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return function(scores.flatten(0, -2), target.flatten()) if scores.dim() == 3 else function(scores, target)

    return of


_LOSSES: dict[type[Loss], LossOf] = {
    CrossEntropy: _classes(F.cross_entropy),
    NegativeLogLikelihood: _classes(F.nll_loss),
    MeanSquaredError: F.mse_loss,
    Huber: F.huber_loss,
    MeanAbsoluteError: F.l1_loss,
    BinaryCrossEntropy: F.binary_cross_entropy_with_logits,
    Mean: lambda y: y.mean(),
    Sum: lambda y: y.sum(),
}


def loss_of(loss: Any) -> tuple[LossOf, type[Loss] | None]:
    """The function of a loss; and its class where foreplan names it, so that its further inputs can be made up.

    Raises:
        UsageError: PyTorch's form of a loss of foreplan's is not known here.
    """
    found: Any = LOSSES.get(loss) if isinstance(loss, str) else loss
    kind: type[Loss] = type(found)
    if kind in _LOSSES:
        return _LOSSES[kind], kind
    if callable(found) and not isinstance(found, Loss):
        return found, None
    known = ", ".join(name for name, each in LOSSES.items() if type(each) in _LOSSES)
    raise UsageError(f"loss: {loss!r} is none that is known in PyTorch here; name one of {known}, or give a function")


def inputs_of(kind: type[Loss], output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Further inputs of a loss that foreplan names: int64 classes, or float32 numbers of the output's shape."""
    if kind in (Mean, Sum):
        return ()
    if kind in (CrossEntropy, NegativeLogLikelihood):
        shape = output.shape[:-1] if output.dim() == 3 else (output.shape[0], *output.shape[2:])
        return (torch.zeros(shape, dtype=torch.int64, device=output.device),)
    return (torch.zeros(output.shape, device=output.device),)


def optimizer_of(optimizer: Any) -> MakeOptimizer:
    """What makes PyTorch's optimizer of parameters: a factory as it is, or that of one of `foreplan.optim`.

    Raises:
        UsageError: PyTorch has none like it.
    """
    kind = type(optimizer).__name__
    if kind in _OPTIMIZERS and type(optimizer).__module__.startswith("foreplan."):
        make, names = _OPTIMIZERS[kind]
        given: dict[str, Any] = {"lr": 1e-3}  # a schedule's rates are numbers outside of the card
        for ours, theirs in names.items():
            if (value := getattr(optimizer, ours, None)) is not None:
                given[theirs] = value
        if kind == "Nesterov":
            given["nesterov"] = True
        return lambda parameters: make(parameters, **given)
    if not callable(optimizer):
        raise UsageError(
            f"optimizer: PyTorch's form of {optimizer!r} is not known here: give one of foreplan.optim's "
            f"{', '.join(_OPTIMIZERS)}, or a function from parameters to an optimizer, such as torch.optim.AdamW"
        )
    found: MakeOptimizer = optimizer
    return found


_DECAY = {"weight_decay": "weight_decay"}
_OPTIMIZERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, str]]] = {
    "SGD": (torch.optim.SGD, _DECAY),
    "Momentum": (torch.optim.SGD, _DECAY | {"momentum": "momentum"}),
    "Nesterov": (torch.optim.SGD, _DECAY | {"momentum": "momentum"}),
    "Adam": (torch.optim.Adam, _DECAY),
    "AdamW": (torch.optim.AdamW, _DECAY),
    "NAdam": (torch.optim.NAdam, _DECAY),
    "RMSprop": (torch.optim.RMSprop, _DECAY | {"momentum": "momentum", "centered": "centered"}),
    "Adagrad": (torch.optim.Adagrad, _DECAY),
}
