"""Muon: the momentum of a matrix, made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foreplan.base.arguments import choice, flag, listed, names_in, number_in, whole
from foreplan.base.errors import UsageError
from foreplan.base.patterns import matches
from foreplan.graph import TensorType, Value
from foreplan.graph.types import FLOAT32
from foreplan.ops.expr import Expr, maximum, sqrt
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import matmul
from foreplan.passes.optimizer.adaptive import AdamW
from foreplan.passes.optimizer.norms import sum_of_squares
from foreplan.passes.optimizer.rule import Common, Exprs, Rule, StateTensor
from foreplan.passes.optimizer.schedule import Schedule
from foreplan.passes.optimizer.site import Site

_ADJUSTED = ("original", "match_rms_adamw")


@dataclass(frozen=True)
class Muon(Common):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), in PyTorch's form; AdamW for what is no matrix.

    Of a matrix p[R, C]: m ← μ·m + (1 − μ)·g, u = μ·m + (1 − μ)·g, p ← p − η·λ·p − η·k·O(u). O is the orthogonal matrix
    nearest to u, as five steps of a Newton-Schulz iteration on u / ‖u‖ find it: X ← a·X + (b·A + c·A²)·X, A = X·Xᵀ, in
    the parameter's own element type. k is √max(1, R/C).

    Attributes:
        nesterov: else u = m.
        coefficients: a, b, c.
        iterations: of Newton-Schulz.
        epsilon: the least ‖u‖; AdamW's ε is 1e-8.
        adjust: k: "original", as above; or "match_rms_adamw", 0.2·√max(R, C), whose steps are as long as AdamW's (Liu
            et al. 2025, arXiv:2502.16982).
        adamw: matrices that AdamW updates too, by patterns: embeddings and the head, as the authors do.
        adamw_rate: the factor of the learning rate for AdamW.
        beta1, beta2: AdamW's.
    """

    learning_rate: float | Schedule = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = True
    coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315)
    iterations: int = 5
    epsilon: float = 1e-7
    adjust: str = "original"
    adamw: Sequence[str] = ()
    adamw_rate: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    scalars = AdamW.scalars

    def __post_init__(self) -> None:
        super().__post_init__()
        given = listed("Muon: coefficients", self.coefficients)
        coefficients = tuple(number_in("Muon: a coefficient", x, -math.inf, math.inf) for x in given)
        if len(coefficients) != 3:
            raise UsageError(f"Muon: there are three coefficients, and {list(coefficients)} is given")
        found = {
            "nesterov": flag("Muon: nesterov", self.nesterov),
            "coefficients": coefficients,
            "iterations": whole("Muon: iterations", self.iterations, 0, 99),
            "adjust": choice("Muon: adjust", self.adjust, _ADJUSTED),
            "adamw": tuple(names_in("Muon: adamw", self.adamw)),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def prepare(self, step: Expr, *products: Expr) -> Exprs:
        """AdamW's."""
        return self._adamw(self.weight_decay).prepare(step)

    def for_parameter(self, name: str, type: TensorType) -> tuple[Rule, float]:  # type: ignore[override]
        """Muon for a matrix, else AdamW; and the factor of its learning rate."""
        own, rate = super().for_parameter(name, type)
        if type.rank == 2 and not any(matches(name, pattern) for pattern in self.adamw):
            return own, rate
        return self._adamw(own.weight_decay), rate * self.adamw_rate

    def patterns(self) -> list[str]:
        """All patterns that name weights."""
        return [*super().patterns(), *self.adamw]

    def kept(self, type: TensorType) -> tuple[StateTensor, ...]:
        """m."""
        return (StateTensor("momentum", type),)

    def add(self, site: Site) -> None:
        """The new momentum, O(u), the new parameter."""
        share = 1.0 - self.momentum
        gradient = site.map(lambda g: g, site.gradient, name="mean")
        site.write(lambda g, m: (m + share * (g - m),), site.state, gradient, *site.state)
        update = site.updates[site.state[0]]
        if self.nesterov:
            update = site.map(lambda g, m: g + self.momentum * (m - g), gradient, update, name="direction")
        step, scale = self._orthogonal(site, update), self._scale(site.parameter.shape)
        read = (site.parameter, step, site.rate)
        site.write(
            lambda p, u, rate: (p - (rate * self.weight_decay) * p - (rate * scale) * u,), (site.parameter,), *read
        )

    def _orthogonal(self, site: Site, x: Value) -> Value:
        """The nearest orthogonal matrix."""
        rows, columns = x.shape
        a, b, c = self.coefficients
        norm = elementwise(
            site.b, lambda s: maximum(sqrt(s), self.epsilon), sum_of_squares(site.b, x), dtype=FLOAT32, name="norm"
        )
        x = site.map(lambda x, n: x / n, x, norm, name="scaled")
        wide = rows <= columns
        for _ in range(self.iterations):
            gram = matmul(site.b, x, x, transpose_a=not wide, transpose_b=wide)
            square = matmul(site.b, gram, gram)
            inner = site.map(lambda g, s: b * g + c * s, gram, square, name="polynomial")
            product = matmul(site.b, inner, x) if wide else matmul(site.b, x, inner)
            x = site.map(lambda x, y: a * x + y, x, product, name="iterate")
        return x

    def _scale(self, shape: Iterable[int]) -> float:
        """k."""
        rows, columns = shape
        if self.adjust == "original":
            return math.sqrt(max(1.0, rows / max(1, columns)))
        return 0.2 * math.sqrt(max(rows, columns))

    def _adamw(self, weight_decay: float) -> AdamW:
        own: dict[str, Any] = {"beta1": self.beta1, "beta2": self.beta2, "weight_decay": weight_decay}
        return AdamW(self.learning_rate, **own)
