"""One module beside PyTorch: two steps of training, and what it gives in evaluation mode after them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import foreplan as fp
from foreplan.base.errors import ForeplanError

# Relative differences that are allowed, in float32, and in float64 where rounding is chaotic: a batch normalisation of
# few numbers, or a ReLU close to zero, makes 1e-7 into any difference within a step, PyTorch's own included.
SINGLE, DOUBLE = 1e-5, 1e-7


@dataclass(frozen=True)
class Verdict:
    """What was found of a module.

    Attributes:
        kind: `right`, `right in float64` alone, `refused`, `not exported` by PyTorch, or exported as another module,
            `right where it draws nothing` of a module that draws random numbers in training mode, or `wrong`.
        why: what differs, or the reason of a refusal.
    """

    kind: str
    why: str = ""


class Unfit(ValueError):
    """Nothing is said of a module that gives other numbers in each call, whatever its mode, or none at all."""


class Squares(nn.Module):
    """The mean squares of all outputs of a module, added up."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One number."""
        outputs = [y for y in pytree.tree_leaves(self.inner(*args, **kwargs)) if isinstance(y, torch.Tensor)]
        return sum(y.square().mean() for y in outputs if y.dtype.is_floating_point)


def without_draws(module: nn.Module) -> nn.Module:
    """A module whose dropout and stochastic depth drop nothing, so that two runs are alike."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(part).__name__)):
                setattr(part, name, 0.0)
        if type(part).__name__ == "StochasticDepth":
            part.p = 0.0  # type: ignore[assignment]
    return module.train()


def without_ties(module: nn.Module) -> nn.Module:
    """A module whose parameters are a little off what they begin with. Those that begin as zeros hide what they
    multiply, and make ties: which of equal numbers are the largest is chance.
    """
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                weight.add_(torch.randn_like(weight), alpha=0.02)
    return module


def judge(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
    """The verdict on a module, whose weights stay.

    Raises:
        Unfit: there is nothing to compare with.
    """
    right = "right"
    if _draws(module, args, kwargs):
        module.eval()
        right = "right where it draws nothing"
        if _draws(module, args, kwargs):
            raise Unfit("two calls give two results, whatever the mode")
    try:
        off = _differences(copied(module), args, kwargs)
        if max(off.values()) <= SINGLE:
            return Verdict(right)
        wide = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, (args, kwargs))
        try:
            exact = _differences(copied(module).double(), *wide)
        except RuntimeError as error:  # PyTorch's own: an op that it has in float32 alone
            exact = {f"none ({error})": np.inf}
    except ForeplanError as error:
        reason = " ".join(str(error).split())
        return Verdict("not exported" if "PyTorch cannot export" in reason else "refused", reason[:300])
    told = ", ".join(f"{name} {value:.0e}" for name, value in off.items())
    if max(exact.values()) <= DOUBLE:
        return Verdict("right in float64", told)
    if apart := _export_is_off(module, args, kwargs):
        return Verdict("not exported", f"PyTorch's own export gives other numbers than the module, by {apart:.0e}")
    return Verdict("wrong", f"{told}; in float64 " + ", ".join(f"{name} {value:.0e}" for name, value in exact.items()))


def copied(module: nn.Module) -> nn.Module:
    """A copy, also of a module that keeps a weight which it has computed from others."""
    for part in module.modules():
        for name, x in vars(part).items():
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                vars(part)[name] = x.detach()
    return copy.deepcopy(module)


def _draws(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two calls of a module give two results."""
    with torch.enable_grad():  # within a module there may be a gradient
        calls = (copied(module)(*copy.deepcopy(args), **copy.deepcopy(kwargs)) for _ in range(2))
        once, again = ([y for y in pytree.tree_leaves(call) if isinstance(y, torch.Tensor)] for call in calls)
    return not all(map(torch.equal, once, again))


@dataclass(frozen=True)
class _Reference:
    """What PyTorch itself does with a module.

    Attributes:
        rate: of its steps.
        losses: of two steps.
        before, after: parameters, by name.
        inference: what it gives in evaluation mode then.
    """

    rate: float
    losses: tuple[float, ...]
    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]
    inference: float

    @property
    def moved(self) -> float:
        """The largest change of a parameter."""
        return _largest(self.after[name] - x for name, x in self.before.items())


def reference(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Reference:
    """Two steps of a module, which stays as it is, and inference after them.

    Raises:
        Unfit: its numbers are not finite.
    """
    ours = Squares(copied(module))  # in training mode, whatever its parts are in

    def parameters() -> dict[str, np.ndarray]:
        return {name: weight.detach().double().numpy().copy() for name, weight in ours.named_parameters()}

    def loss() -> torch.Tensor:
        return ours(*copy.deepcopy(args), **copy.deepcopy(kwargs))  # type: ignore[no-any-return]

    before, losses, rate = parameters(), [], 0.0
    for _ in range(2):
        found = loss()
        ours.zero_grad()
        found.backward()
        gradients = [p.grad.numpy() for p in ours.parameters() if p.grad is not None]
        # A power of two, which is the same in float32 and float64, so that no number moves far.
        rate = rate or 2.0 ** -(6 + max(0, math.ceil(math.log2(_largest(gradients) + 1e-9))))
        torch.optim.SGD(ours.parameters(), rate).step()
        losses.append(found.item())
    result = _Reference(rate, tuple(losses), before, parameters(), ours.eval() and loss().item())
    if not all(map(math.isfinite, (*result.losses, result.inference, result.moved))):
        raise Unfit("PyTorch's own numbers are not finite")
    return result


def _differences(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    theirs = reference(module, args, kwargs)
    graph = fp.from_torch(Squares(module), *args, kwargs=kwargs, check=False)  # what differs is measured here
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    feeds = {value.name: x.numpy() for value, x in zip(graph.inputs, tensors, strict=True)}
    session = fp.compile(graph, lambda output: output, fp.optim.SGD(theirs.rate), target="numpy").bind()
    losses = [_relative(session.step(feeds).loss, loss) for loss in theirs.losses]
    found = session.state_dict()
    apart = _largest(np.asarray(found[name], np.float64) - weight for name, weight in theirs.after.items())
    (value,) = fp.compile(graph, target="numpy").bind(share=session).step(feeds).outputs.values()
    # Of weights, a hundredth of the largest change is as much as 1e-5 of a loss.
    weights = apart / (theirs.moved or 1.0) * (1e-3 if apart > 1e-6 else 0.0)
    return {"losses": max(losses), "weights": weights, "inference": _relative(float(value), theirs.inference)}


def _largest(arrays: Iterable[np.ndarray]) -> float:
    return max((float(np.abs(each).max()) for each in arrays if each.size), default=0.0)


def _export_is_off(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """How far the program that PyTorch exports is off the module, run by PyTorch itself; 0 within rounding."""
    program = torch.export.export(copied(module), args, kwargs, strict=False)
    with torch.no_grad():
        called = (each(*copy.deepcopy(args), **copy.deepcopy(kwargs)) for each in (program.module(), module))
        found, want = ([y for y in pytree.tree_leaves(y) if isinstance(y, torch.Tensor)] for y in called)
    off = max(
        float((x.double() - y.double()).abs().max() / (y.double().abs().max() + 1e-6)) for x, y in zip(found, want)
    )
    return off if off > 1e-4 else 0.0


def _relative(found: float, want: float) -> float:
    off = abs(found - want) / max(abs(want), 1e-6)
    return off if np.isfinite(off) else np.inf
