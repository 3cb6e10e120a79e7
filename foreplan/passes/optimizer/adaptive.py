"""A step size for each element, from the squares of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foreplan.base.arguments import flag
from foreplan.graph import TensorType
from foreplan.ops.expr import Const, Expr, call, maximum, sqrt
from foreplan.passes.optimizer.rule import Elementwise, Exprs, StateTensor
from foreplan.passes.optimizer.schedule import Schedule
from foreplan.passes.optimizer.site import Site


@dataclass(frozen=True)
class Adagrad(Elementwise):
    """s ← s + g², p ← p − η·g / (√s + ε) (Duchi, Hazan and Singer 2011); weight decay is added to the gradient.

    Attributes:
        initial: what s is at first.
    """

    learning_rate: float | Schedule = 1e-2
    initial: float = 0.0
    epsilon: float = 1e-10
    weight_decay: float = 0.0

    def kept(self, type: TensorType) -> tuple[StateTensor, ...]:
        """s."""
        return (StateTensor("sum_of_squares", type, self.initial),)

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        gradient = gradient + self.weight_decay * parameter
        total = state[0] + gradient * gradient
        return (parameter - rate * (gradient / (sqrt(total) + self.epsilon)), total)

    def add(self, site: Site) -> None:
        """One map over the parameter's elements. Where the gradient is rows of a table, and nothing decays, only these
        rows change, by the same formula: a gradient of zero changes neither s nor p.
        """
        if not site.by_sums or self.weight_decay:
            super().add(site)
            return
        (total,), (site, _) = site.state, site.summed()
        site.add_rows(total, lambda row: row * row)
        site.add_rows(
            site.parameter,
            lambda row, rate, total: -(rate * (row / (sqrt(total) + self.epsilon))),
            *(site.rate, site.rows_of(site.updates[total])),
        )


@dataclass(frozen=True)
class RMSprop(Elementwise):
    """s ← α·s + (1 − α)·g², p ← p − η·g / (√s + ε) (Tieleman and Hinton 2012, lecture 6.5).

    Weight decay is added to the gradient. With momentum, v ← μ·v + g / (√s + ε) and p ← p − η·v (Graves 2013,
    arXiv:1308.0850).

    Attributes:
        centered: take the square of the mean gradient from s, as Graves does.
    """

    learning_rate: float | Schedule = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "centered", flag("RMSprop: centered", self.centered))

    @property
    def state(self) -> tuple[str, ...]:
        """s, v if there is momentum, the mean gradient if it is taken off."""
        return ("second_moment",) + ("velocity",) * (self.momentum > 0) + ("first_moment",) * self.centered

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        gradient = gradient + self.weight_decay * parameter
        kept = [self.alpha * state[0] + (1.0 - self.alpha) * (gradient * gradient)]
        spread = kept[0]
        if self.centered:
            mean = self.alpha * state[-1] + (1.0 - self.alpha) * gradient
            spread = maximum(spread - mean * mean, 0.0)  # which rounding may make less than 0
            kept.append(mean)
        direction = gradient / (sqrt(spread) + self.epsilon)
        if self.momentum:
            direction = self.momentum * state[1] + direction
            kept.insert(1, direction)
        return (parameter - rate * direction, *kept)


@dataclass(frozen=True)
class Adam(Elementwise):
    """Adam (Kingma and Ba 2015, algorithm 1); weight decay, if any, is added to the gradient."""

    learning_rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    scalars: ClassVar[tuple[str, ...]] = ("correction1", "correction2")

    @property
    def state(self) -> tuple[str, ...]:
        """The means of gradients and of their squares."""
        return ("first_moment", "second_moment")

    def prepare(self, step: Expr, *products: Expr) -> Exprs:
        """1 / (1 − β₁ᵗ) and 1 / √(1 − β₂ᵗ)."""
        one, two = Const(self.beta1), Const(self.beta2)
        return (1.0 / (1.0 - call("pow", one, step)), 1.0 / sqrt(1.0 - call("pow", two, step)))

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        return self._step(parameter, gradient + self.weight_decay * parameter, state, rate, scalars)

    def moments(self, gradient: Expr, state: Exprs) -> Exprs:
        """The new means of gradients and of their squares."""
        first = self.beta1 * state[0] + (1.0 - self.beta1) * gradient
        return (first, self.beta2 * state[1] + (1.0 - self.beta2) * (gradient * gradient))

    def direction(self, moments: Exprs, scalars: Exprs) -> Expr:
        """The step, for a learning rate of 1."""
        return (moments[0] * scalars[0]) / (sqrt(moments[1]) * scalars[1] + self.epsilon)

    def _step(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        moments = self.moments(gradient, state)
        return (parameter - rate * self.direction(moments, scalars), *moments)


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2): p ← p − η·λ·p beside Adam's step."""

    weight_decay: float = 1e-2

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        shrunk = parameter - (rate * self.weight_decay) * parameter
        return self._step(shrunk, gradient, state, rate, scalars)


@dataclass(frozen=True)
class NAdam(Adam):
    """Adam with Nesterov's momentum (Dozat 2016), in PyTorch's form; weight decay is added to the gradient.

    The momentum of step t is μₜ = β₁·(1 − ½·0.96^(t·ψ)). With Mₜ the product of all of them up to t, m and v the means
    of gradients and of their squares, and v̂ = v / (1 − β₂ᵗ):
    p ← p − η·((1 − μₜ)·g / (1 − Mₜ) + μₜ₊₁·m / (1 − Mₜ₊₁)) / (√v̂ + ε).

    Attributes:
        momentum_decay: ψ.
    """

    learning_rate: float | Schedule = 2e-3
    momentum_decay: float = 4e-3
    scalars: ClassVar[tuple[str, ...]] = ("gradient_share", "momentum_share", "correction2")
    products: ClassVar[tuple[str, ...]] = ("momentum_product",)

    def prepare(self, step: Expr, *products: Expr) -> Exprs:
        """(1 − μₜ) / (1 − Mₜ), μₜ₊₁ / (1 − Mₜ₊₁), 1 / √(1 − β₂ᵗ), then Mₜ."""
        now, after = self._momentum(step), self._momentum(step + 1.0)
        product = products[0] * now
        correction = 1.0 / sqrt(1.0 - call("pow", Const(self.beta2), step))
        return ((1.0 - now) / (1.0 - product), after / (1.0 - product * after), correction, product)

    def _momentum(self, step: Expr) -> Expr:
        return self.beta1 * (1.0 - 0.5 * call("pow", Const(0.96), step * self.momentum_decay))

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        gradient = gradient + self.weight_decay * parameter
        first, second = self.moments(gradient, state)
        direction = scalars[0] * gradient + scalars[1] * first
        return (parameter - rate * (direction / (sqrt(second) * scalars[2] + self.epsilon)), first, second)
