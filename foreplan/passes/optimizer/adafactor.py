"""Adafactor: the squares of gradients are kept as a row and a column instead of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foreplan.graph import TensorType, Value
from foreplan.graph.types import FLOAT32, FLOAT64
from foreplan.ops.expr import Expr, call, cast, maximum, minimum, rsqrt, sqrt
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.passes.optimizer.norms import sum_of_squares
from foreplan.passes.optimizer.rule import Common, Exprs, StateTensor
from foreplan.passes.optimizer.schedule import Schedule
from foreplan.passes.optimizer.site import Site


@dataclass(frozen=True)
class Adafactor(Common):
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5), in PyTorch's form.

    Of a parameter [..., R, C], the means of g² along the last axis, r[..., R], and along the one before, c[..., C], are
    kept as running averages with the decay 1 − t^τ, and v = r·cᵀ / mean(r). Of a vector, or a scalar, v itself is kept.
    Then u = g / √v, and p ← p − η·λ·p − α·u / max(1, rms(u) / d), with α = max(ε₂, rms(p)) · min(η, 1/√t).

    Attributes:
        beta2_decay: τ, not above 0.
        epsilon1: √v and mean(r) are at least this; None: the step from 1 to the next number of the parameter's type.
        epsilon2: ε₂, the least scale of a parameter.
        clip_update: d.
    """

    learning_rate: float | Schedule = 1e-2
    beta2_decay: float = -0.8
    epsilon1: float | None = None
    epsilon2: float = 1e-3
    clip_update: float = 1.0
    weight_decay: float = 0.0
    scalars = ("share", "largest_rate")

    def prepare(self, step: Expr, *products: Expr) -> Exprs:
        """t^τ and 1/√t."""
        return (call("pow", step, self.beta2_decay), rsqrt(step))

    def kept(self, type: TensorType) -> tuple[StateTensor, ...]:
        """r and c; of a vector or a scalar, v."""
        if type.rank < 2:
            return (StateTensor("second_moment", type),)
        row, column = type.shape[:-1], (*type.shape[:-2], type.shape[-1])
        return (StateTensor("row_moment", type.with_shape(row)), StateTensor("column_moment", type.with_shape(column)))

    def add(self, site: Site) -> None:
        """The new means, u, its norm and the parameter's, the new parameter."""
        gradient = site.map(lambda g: g, site.gradient, name="mean")
        least = float(self._least(site.parameter))
        if len(site.parameter.shape) < 2:
            site.write(
                lambda g, v, share, _: (v + share * (g * g - v),), site.state, gradient, *site.state, *site.scalars
            )
            update = site.map(_over_root(least), gradient, site.updates[site.state[0]], name="step")
        else:
            update = self._factored(site, gradient, least)
        rate = self._rate(site, update)
        last = (site.parameter, update, site.rate, rate)
        site.write(lambda p, u, rate, own: (p - (rate * self.weight_decay) * p - own * u,), (site.parameter,), *last)

    def _least(self, parameter: Value) -> float:
        if self.epsilon1 is not None:
            return self.epsilon1
        return 2.0**-7 if parameter.dtype.name == "bfloat16" else float(np.finfo(parameter.dtype.numpy).eps)

    def _factored(self, site: Site, gradient: Value, least: float) -> Value:
        """u of a matrix, or of several."""
        b, shape = site.b, site.parameter.shape
        squares = site.map(lambda g: g * g, gradient, name="square")
        share = site.scalars[0]
        for state, axis in zip(site.state, (-1, -2)):
            mean = reduce(b, "mean", squares, axis)
            site.write(lambda x, m, share: (x + share * (m - x),), (state,), state, mean, share)
        row, column = (site.updates[state] for state in site.state)
        scale = reduce(b, "mean", row, -1, keepdims=True)
        share_of_row = site.map(lambda r, m: r / maximum(m, least), row, scale, name="share_of_row")
        spread = reshape(b, share_of_row, (*shape[:-1], 1)), reshape(b, column, (*shape[:-2], 1, shape[-1]))
        over_root = _over_root(least)
        return site.map(lambda g, r, c: over_root(g, r * c), gradient, *spread, name="step")

    def _rate(self, site: Site, update: Value) -> Value:
        """α / max(1, rms(u) / d), a float32 scalar."""
        size = max(1, site.parameter.type.size)

        def rate(p: Expr, u: Expr, rate: Expr, largest: Expr) -> Expr:
            own = cast(rate, FLOAT64) * site.rate_factor
            scale = maximum(sqrt(p / size), self.epsilon2) * minimum(own, cast(largest, FLOAT64))
            return scale / maximum(sqrt(u / size) / self.clip_update, 1.0)

        squares = [sum_of_squares(site.b, value) for value in (site.parameter, update)]
        return elementwise(site.b, rate, *squares, site.rate, site.scalars[1], dtype=FLOAT32, name="own_rate")


def _over_root(least: float) -> Callable[[Expr, Expr], Expr]:
    """g / √v, where √v is no less than this."""
    return lambda g, v: g * rsqrt(maximum(v, least * least))
