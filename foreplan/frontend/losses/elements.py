"""Losses that are means over all elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import numpy as np

from foreplan.base.arguments import choice, flag, listed, number_in
from foreplan.base.errors import ShapeError
from foreplan.frontend.losses.final import before_sigmoid
from foreplan.frontend.losses.loss import Loss
from foreplan.frontend.tracing.elementwise import apply
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.graph import TensorType
from foreplan.ops import expr as ex
from foreplan.ops.expr import call


@dataclass(frozen=True)
class _Elementwise(Loss):
    """Mean of a function of output and target; `target` is as the output."""

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """`target`."""
        (output,) = outputs
        return {"target": output}

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """The averaged term, from one element of each."""
        raise NotImplementedError

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: output and target. Returns: a scalar."""
        return apply(self.name, self.term, *self.arguments(tensors, inputs)).mean()


@dataclass(frozen=True)
class BinaryCrossEntropy(_Elementwise):
    """Mean of −w·target·log σ(logit) − (1 − target)·log(1 − σ(logit)), σ the sigmoid; `target` is as the logits.

    A sigmoid that ends the model is taken into the loss, and a note says so.

    Attributes:
        pos_weight: w: one number, or one for each element of the last axis; None: 1.
    """

    name: ClassVar[str] = "binary_cross_entropy"
    pos_weight: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        given = self.pos_weight
        if given is None:
            return
        one = isinstance(given, Real)
        found = [number_in("pos_weight", x, 0.0, math.inf) for x in ([given] if one else listed("pos_weight", given))]
        object.__setattr__(self, "pos_weight", found[0] if one else tuple(found))

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """Without overflow."""
        return ex.maximum(output, 0.0) - output * target + call("log1p", ex.exp(-call("abs", output)))

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: logits and target. Returns: a scalar."""
        logits, target = self.arguments(tensors, inputs)
        logits = before_sigmoid(logits, self.name)
        if self.pos_weight is None:
            return super().__call__(logits, target)
        weights: float | np.ndarray
        if isinstance(self.pos_weight, float):
            weights = self.pos_weight
        else:
            weights = np.array(self.pos_weight, np.float32)
            if weights.shape != logits.shape[-1:]:
                raise ShapeError(f"pos_weight has {weights.size} numbers, and the last axis of {logits!r} has others")
        return apply(self.name, weighted_binary, logits, target, weights).mean()


def weighted_binary(x: ex.Expr, target: ex.Expr, weight: ex.Expr) -> ex.Expr:
    """(1 − target)·x + (1 + (weight − 1)·target)·log(1 + e⁻ˣ)."""
    softplus = ex.maximum(-x, 0.0) + call("log1p", ex.exp(-call("abs", x)))
    return (1.0 - target) * x + (1.0 + (weight - 1.0) * target) * softplus


@dataclass(frozen=True)
class MeanSquaredError(_Elementwise):
    """Mean of (output − target)²."""

    name: ClassVar[str] = "mse"

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """The difference's square."""
        return call("square", output - target)


@dataclass(frozen=True)
class MeanAbsoluteError(_Elementwise):
    """Mean of |output − target|."""

    name: ClassVar[str] = "l1"

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """The difference's magnitude."""
        return call("abs", output - target)


@dataclass(frozen=True)
class Huber(_Elementwise):
    """Mean of d²/2 where |d| ≤ delta, else delta·(|d| − delta/2), d = output − target (Huber 1964).

    Attributes:
        delta: where the parabola becomes a line.
    """

    name: ClassVar[str] = "huber"
    delta: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", number_in("delta", self.delta, math.ulp(0.0), math.inf))

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """Parabola or line."""
        d = output - target
        size = call("abs", d)
        return ex.where(size <= self.delta, 0.5 * call("square", d), self.delta * (size - 0.5 * self.delta))


@dataclass(frozen=True)
class KLDivergence(_Elementwise):
    """Mean of t·(log t − x): how far probabilities t are from those whose logarithms are x (Kullback and Leibler 1951).

    `target` is t, in the shape of the output x. Parameters are those of PyTorch's KLDivLoss. A term whose probability
    is 0 is 0, whatever x is.

    Attributes:
        reduction: "mean" over all elements, as in PyTorch; or "batchmean", the sum over the extent of the first axis,
            which is the divergence itself.
        log_target: whether the target holds log t.
    """

    name: ClassVar[str] = "kl_div"
    reduction: str = "mean"
    log_target: bool = False

    def __post_init__(self) -> None:
        choice("reduction", self.reduction, ("mean", "batchmean"))
        object.__setattr__(self, "log_target", flag("log_target", self.log_target))

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """Without a logarithm of 0, and without 0 · ∞, in derivatives too."""
        t = ex.exp(target) if self.log_target else target
        some = t > 0.0
        x = ex.where(some, output, 0.0)
        log_t = ex.where(some, target, 0.0) if self.log_target else ex.log(ex.where(some, target, 1.0))
        return ex.where(some, t * (log_t - x), 0.0)

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: logarithms of probabilities, and target. Returns: a scalar."""
        output, target = self.arguments(tensors, inputs)
        if self.reduction == "mean":
            return super().__call__(output, target)
        if not output.ndim:
            raise ShapeError("kl_div with the reduction batchmean needs outputs with an axis of samples")
        return apply(self.name, self.term, output, target).sum() * (1.0 / max(1, output.shape[0]))
