"""SparseAdam: Adam's step of the rows of a table that a step has read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.graph import Array, Kind, TensorType, Value
from foreplan.graph.types import FLOAT32, INT64
from foreplan.ops.expr import Expr, call, sqrt, where
from foreplan.ops.index import ScatterAdd, positions
from foreplan.ops.join import concat
from foreplan.ops.map import elementwise
from foreplan.ops.shape import broadcast_to, reshape
from foreplan.passes.optimizer.adaptive import Adam
from foreplan.passes.optimizer.rows import flat_indices
from foreplan.passes.optimizer.rule import Common, Exprs, StateTensor
from foreplan.passes.optimizer.schedule import Schedule
from foreplan.passes.optimizer.site import Site


@dataclass(frozen=True)
class SparseAdam(Common):
    """Adam of the rows that a step has read, in the form of `torch.optim.SparseAdam`; Adam for what is no table.

    Of each row that a step has read, with g the sum of its gradients: m ← m + (1 − β₁)·(g − m),
    v ← v + (1 − β₂)·(g² − v), p ← p − η·(√(1 − β₂ᵗ) / (1 − β₁ᵗ))·m / (√v + ε). t counts all steps. Other rows keep p, m
    and v as they are.

    A table is a parameter that lookups alone read, such as that of an embedding. Every other parameter gets the step of
    `Adam` with the same numbers; PyTorch raises an error for it. There is no weight decay. Gradients cannot be summed
    over micro-batches (`accumulate`), which do not say which rows were read.
    """

    learning_rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    scalars = Adam.scalars

    def prepare(self, step: Expr, *products: Expr) -> Exprs:
        """Adam's."""
        return self._adam.prepare(step)

    def kept(self, type: TensorType) -> tuple[StateTensor, ...]:
        """The means of gradients and of their squares."""
        return self._adam.kept(type)

    def add(self, site: Site) -> None:
        """The rows alone where they say how the table changes; else one map over all elements, most of which keep
        theirs. The results are the same.
        """
        if site.count is not None:
            raise UsageError(
                "SparseAdam needs to know the rows that a step has read, and gradients summed over micro-batches do "
                "not say which: leave accumulate out, or use Adam"
            )
        if not site.rows:
            self._adam.add(site)
        elif site.by_sums:
            self._add_rows(*site.summed())
        else:
            self._write_read(site)

    @property
    def _adam(self) -> Adam:
        return Adam(self.learning_rate, self.beta1, self.beta2, self.epsilon)

    def _changes(self, gradient: Expr, first: Expr, second: Expr, rate: Expr, *scalars: Expr) -> Exprs:
        """Of p, m and v, from both moments."""
        d_first = (1.0 - self.beta1) * (gradient - first)
        d_second = (1.0 - self.beta2) * (gradient * gradient - second)
        size = (sqrt(second + d_second) + self.epsilon) * scalars[1]
        return (-(rate * (((first + d_first) * scalars[0]) / size)), d_first, d_second)

    def _add_rows(self, site: Site, first: Value) -> None:
        """Add the changes of each row once, where its index stands first."""
        b, (count,) = site.b, first.shape
        places = b.store(f"{b.scope}positions", first.type, Kind.CONSTANT, Array(positions(count, INT64)))
        once = elementwise(b, lambda i, j: where(call("eq", i, j), 1.0, 0.0), first, places, dtype=FLOAT32, name="once")
        once = reshape(b, once, (count, *[1] * (len(site.parameter.shape) - 1)))
        read = (once, *map(site.rows_of, site.state), site.rate, *site.scalars)

        def change(of: int, row: Expr, once: Expr, *read: Expr) -> Expr:
            return where(once > 0.0, self._changes(row, *read)[of], 0.0)

        for i, target in enumerate((site.parameter, *site.state)):
            site.add_rows(target, partial(change, i), *read)

    def _write_read(self, site: Site) -> None:
        """Write all elements; those of rows that no index has read as they were."""
        b, rank = site.b, len(site.parameter.shape)
        places = concat(b, [flat_indices(b, rows) for rows in site.rows])
        one = b.store(f"{b.scope}one", TensorType(FLOAT32, ()), Kind.CONSTANT, Array(np.ones((), np.float32)))
        counts = b.apply(ScatterAdd(0, site.parameter.shape[:1]), places, broadcast_to(b, one, places.shape))
        counts = reshape(b, counts, (*counts.shape, *[1] * (rank - 1)))

        def new(p: Expr, gradient: Expr, first: Expr, second: Expr, count: Expr, *read: Expr) -> Exprs:
            old = (p, first, second)
            changes = self._changes(gradient, first, second, *read)
            return tuple(where(count > 0.0, x + change, x) for x, change in zip(old, changes))

        read = (site.parameter, site.gradient, *site.state, counts, site.rate, *site.scalars)
        site.write(new, (site.parameter, *site.state), *read)
