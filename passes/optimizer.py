"""Optimizers: a state and a scalar formula each; the update of a parameter is one `map` over its elements."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from foreplan.errors import UsageError
from foreplan.graph import Builder, Fill, Kind, TensorType, Value
from foreplan.graph.types import FLOAT32, FLOAT64, INT64
from foreplan.ops.expr import Arg, Const, Expr, call, cast, sqrt
from foreplan.ops.map import elementwise, elementwise_many

Exprs = tuple[Expr, ...]


class Optimizer(Protocol):
    """A rule that turns a parameter, its gradient and its state into the parameter and state of the next step."""

    learning_rate: float

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept a parameter, of its own shape, all zero at first."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars, the same for all parameters, that `prepare` computes from the step count."""

    def prepare(self, step: Expr) -> tuple[Expr, ...]:
        """The scalars, from the number of this step, counted from 1, as a float."""

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """The new parameter, then the new state."""


def _check(optimizer: object, **limits: tuple[float, float]) -> None:
    for name, (low, high) in limits.items():
        value = getattr(optimizer, name)
        if not isinstance(value, Real) or not low <= float(value) < high:
            raise UsageError(f"{type(optimizer).__name__}: {name} must be in [{low:g}, {high:g}), and is {value!r}")
        object.__setattr__(optimizer, name, float(value))  # NumPy's numbers would take over in a product with an Expr


_RATE, _UNIT, _ANY = (0.0, float("inf")), (0.0, 1.0), (0.0, float("inf"))


@dataclass(frozen=True)
class SGD:
    """p ← p − η·(g + λ·p) (Robbins and Monro 1951; η learning rate, λ weight decay)."""

    learning_rate: float
    weight_decay: float = 0.0
    state = ()
    scalars = ()

    def __post_init__(self) -> None:
        _check(self, learning_rate=_RATE, weight_decay=_ANY)

    def prepare(self, step: Expr) -> tuple[Expr, ...]:
        """Nothing."""
        return ()

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        return (parameter - rate * (gradient + self.weight_decay * parameter),)


@dataclass(frozen=True)
class Momentum:
    """v ← μ·v + g + λ·p, p ← p − η·v (Polyak 1964, in the form of Sutskever et al. 2013 that frameworks use)."""

    learning_rate: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    state = ("velocity",)
    scalars = ()

    def __post_init__(self) -> None:
        _check(self, learning_rate=_RATE, momentum=_UNIT, weight_decay=_ANY)

    def prepare(self, step: Expr) -> tuple[Expr, ...]:
        """Nothing."""
        return ()

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        velocity = self.momentum * state[0] + (gradient + self.weight_decay * parameter)
        return (parameter - rate * velocity, velocity)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """v ← μ·v + d, p ← p − η·(d + μ·v) with d = g + λ·p (Nesterov 1983, in the form of Sutskever et al. 2013)."""

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        direction = gradient + self.weight_decay * parameter
        velocity = self.momentum * state[0] + direction
        return (parameter - rate * (direction + self.momentum * velocity), velocity)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1); weight decay, if any, is added to the gradient."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    state = ("first_moment", "second_moment")
    scalars = ("correction1", "correction2")

    def __post_init__(self) -> None:
        _check(self, learning_rate=_RATE, beta1=_UNIT, beta2=_UNIT, epsilon=_ANY, weight_decay=_ANY)

    def prepare(self, step: Expr) -> tuple[Expr, ...]:
        """1 / (1 − β₁ᵗ) and 1 / √(1 − β₂ᵗ)."""
        one, two = Const(self.beta1), Const(self.beta2)
        return (1.0 / (1.0 - call("pow", one, step)), 1.0 / sqrt(1.0 - call("pow", two, step)))

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        return self._moments(parameter, gradient + self.weight_decay * parameter, state, rate, scalars)

    def _moments(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        first = self.beta1 * state[0] + (1.0 - self.beta1) * gradient
        second = self.beta2 * state[1] + (1.0 - self.beta2) * (gradient * gradient)
        step = (first * scalars[0]) / (sqrt(second) * scalars[1] + self.epsilon)
        return (parameter - rate * step, first, second)


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2): p ← p − η·λ·p beside Adam's step."""

    weight_decay: float = 1e-2

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        shrunk = parameter - (rate * self.weight_decay) * parameter
        return self._moments(shrunk, gradient, state, rate, scalars)


class Updater:
    """Adds an optimizer's nodes to a graph under construction: one learning rate, one step count, state a parameter."""

    def __init__(self, b: Builder, optimizer: Optimizer) -> None:
        self.b, self.optimizer = b, optimizer
        self.updates: dict[Value, Value] = {}
        self.rate = b.input("learning_rate", TensorType(FLOAT32, ()), Fill(optimizer.learning_rate))
        self.step = b.store("step", TensorType(INT64, ()), Kind.STATE, Fill(0))
        next_step = elementwise(b, lambda t: t + 1, self.step, name="next_step")
        self.updates[self.step] = next_step
        self.scalars: tuple[Value, ...] = ()
        if optimizer.scalars:
            # 1 − 0.999 loses most of its digits in float32.
            exprs = [cast(expr, FLOAT32) for expr in optimizer.prepare(cast(Arg(0), FLOAT64))]
            self.scalars = elementwise_many(b, exprs, next_step, name="corrections", outputs=optimizer.scalars)

    def update(self, parameter: Value, gradient: Value) -> None:
        """Add the update of one parameter."""
        n = len(self.optimizer.state)
        state = [
            self.b.store(f"{parameter.name}/{name}", parameter.type, Kind.STATE, Fill(0))
            for name in self.optimizer.state
        ]
        inputs = (parameter, gradient, *state, self.rate, *self.scalars)
        args = [_as(Arg(i), value, parameter) for i, value in enumerate(inputs)]
        exprs = self.optimizer.update(args[0], args[1], tuple(args[2 : 2 + n]), args[2 + n], tuple(args[3 + n :]))
        names = [f"{value.name}/next" for value in (parameter, *state)]
        new = elementwise_many(self.b, exprs, *inputs, name="update", outputs=names)
        self.updates |= dict(zip((parameter, *state), new))

    def finish(self) -> dict[Value, Value]:
        """Every stored value's content for the next step."""
        return self.updates


def _as(arg: Arg, value: Value, like: Value) -> Expr:
    """The argument in the parameter's own element type, so that the update keeps that type."""
    return arg if value.dtype == like.dtype else cast(arg, like.dtype)
