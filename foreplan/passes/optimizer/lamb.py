"""LAMB: Adam's step, whose length is that of the parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foreplan.graph import Value
from foreplan.graph.types import FLOAT32
from foreplan.ops.expr import Expr, call, sqrt, where
from foreplan.ops.map import elementwise
from foreplan.passes.optimizer.adaptive import Adam
from foreplan.passes.optimizer.norms import sum_of_squares
from foreplan.passes.optimizer.schedule import Schedule
from foreplan.passes.optimizer.site import Site


@dataclass(frozen=True)
class LAMB(Adam):
    """p ← p − η·(‖p‖ / ‖r‖)·r, with r Adam's step plus λ·p (You et al. 2020, arXiv:1904.00962, algorithm 2).

    The factor is 1 where either norm is 0. Norms are of each parameter by itself.
    """

    by_element: ClassVar[bool] = False
    learning_rate: float | Schedule = 1e-3
    epsilon: float = 1e-6

    def add(self, site: Site) -> None:
        """The new moments, r, two norms, the new parameter."""
        site.write(lambda g, *state: self.moments(g, state), site.state, site.gradient, *site.state)

        def step(p: Expr, first: Expr, second: Expr, *scalars: Expr) -> Expr:
            return self.direction((first, second), scalars) + self.weight_decay * p

        moments = [site.updates[value] for value in site.state]
        length = site.map(step, site.parameter, *moments, *site.scalars, name="step")
        read = (site.parameter, length, site.rate, self._trust(site, length))
        site.write(lambda p, r, rate, trust: (p - rate * trust * r,), (site.parameter,), *read)

    @staticmethod
    def _trust(site: Site, step: Value) -> Value:
        """‖p‖ / ‖r‖, a float32 scalar."""

        def ratio(p: Expr, r: Expr) -> Expr:
            either = call("or", call("eq", p, 0.0), call("eq", r, 0.0))
            return where(either, 1.0, sqrt(p / where(either, 1.0, r)))

        squares = [sum_of_squares(site.b, value) for value in (site.parameter, step)]
        return elementwise(site.b, ratio, *squares, dtype=FLOAT32, name="trust")
