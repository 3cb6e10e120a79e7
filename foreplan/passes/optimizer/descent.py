"""Gradient descent, with and without momentum."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.graph import Value
from foreplan.ops.expr import Expr, call
from foreplan.passes.optimizer.rule import Elementwise, Exprs
from foreplan.passes.optimizer.schedule import Schedule
from foreplan.passes.optimizer.site import Site


@dataclass(frozen=True)
class SGD(Elementwise):
    """p ← p − η·(g + λ·p) (Robbins and Monro 1951; η learning rate, λ weight decay)."""

    learning_rate: float | Schedule
    weight_decay: float = 0.0

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        return (parameter - rate * (gradient + self.weight_decay * parameter),)

    def add(self, site: Site) -> None:
        """One map over the parameter's elements. Where the gradient is rows of a table, and nothing decays, only these
        rows change, and the whole gradient is never made.
        """
        if site.by_rows and not self.weight_decay:
            site.add_rows(site.parameter, lambda row, rate: -rate * row, site.rate)
        else:
            super().add(site)


@dataclass(frozen=True)
class Momentum(Elementwise):
    """v ← μ·v + g + λ·p, p ← p − η·v (Polyak 1964, in the form of Sutskever et al. 2013 that frameworks use)."""

    learning_rate: float | Schedule
    momentum: float = 0.9
    weight_decay: float = 0.0

    @property
    def state(self) -> tuple[str, ...]:
        """v."""
        return ("velocity",)

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        velocity = self.momentum * state[0] + (gradient + self.weight_decay * parameter)
        return (parameter - rate * velocity, velocity)

    def add(self, site: Site) -> None:
        """One map over the parameter's elements. Where the gradient is rows of a table, and nothing decays, they are
        added to v as they are, and the whole gradient is never made.
        """
        if site.by_rows and not self.weight_decay:
            self.add_rows(site, *site.state)
        else:
            super().add(site)

    def add_rows(self, site: Site, velocity: Value) -> None:
        """v ← μ·v + g by rows, then p ← p − η·v."""
        site.add_rows(velocity, lambda row: row, first=lambda v: self.momentum * v, of=[velocity])
        read = site.parameter, site.updates[velocity], site.rate
        site.write(lambda p, v, rate: (p - rate * v,), read[:1], *read)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """v ← μ·v + d, p ← p − η·(d + μ·v) with d = g + λ·p (Nesterov 1983, in the form of Sutskever et al. 2013)."""

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        direction = gradient + self.weight_decay * parameter
        velocity = self.momentum * state[0] + direction
        return (parameter - rate * (direction + self.momentum * velocity), velocity)

    def add_rows(self, site: Site, velocity: Value) -> None:
        """v ← μ·v + g by rows, then p ← p − η·μ·v − η·g by rows."""
        site.add_rows(velocity, lambda row: row, first=lambda v: self.momentum * v, of=[velocity])
        site.add_rows(
            site.parameter,
            lambda row, rate: -rate * row,
            site.rate,
            first=lambda p, v, rate: p - rate * (self.momentum * v),
            of=[site.parameter, site.updates[velocity], site.rate],
        )


@dataclass(frozen=True)
class Lion(Elementwise):
    """p ← p − η·(sign(β₁·m + (1 − β₁)·g) + λ·p), then m ← β₂·m + (1 − β₂)·g (Chen et al. 2023, arXiv:2302.06675)."""

    learning_rate: float | Schedule = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 1e-3

    @property
    def state(self) -> tuple[str, ...]:
        """m."""
        return ("momentum",)

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        direction = call("sign", self.beta1 * state[0] + (1.0 - self.beta1) * gradient)
        momentum = self.beta2 * state[0] + (1.0 - self.beta2) * gradient
        return (parameter - rate * (direction + self.weight_decay * parameter), momentum)
