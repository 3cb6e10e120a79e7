"""Optimizers: a state and a scalar formula each; the update of a parameter is one `map` over its elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Protocol, Self

from foreplan.arguments import choice, instance, names_in, number_in
from foreplan.errors import UsageError
from foreplan.graph import Builder, Fill, Kind, TensorType, Value
from foreplan.graph.types import FLOAT32, FLOAT64, INT64
from foreplan.ops.expr import Arg, Const, Expr, call, cast, maximum, sqrt, where
from foreplan.ops.map import convert, elementwise, elementwise_many
from foreplan.ops.matmul import matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.passes.loss_scale import LossScale, is_finite
from foreplan.patterns import close_names, matches, most_exact
from foreplan.units import format_bytes

Exprs = tuple[Expr, ...]

ROW = 1 << 16  # elements that are squared and added in one product


class Optimizer(Protocol):
    """A rule that turns a parameter, its gradient and its state into the parameter and state of the next step."""

    @property
    def learning_rate(self) -> float:
        """Default of the step's input of that name."""

    @property
    def clip_norm(self) -> float | None:
        """If the norm of all gradients together is larger than this, they are scaled down to it; None: never."""

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors that are kept for each parameter, of its shape, all zero at first."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars, the same for all parameters, that `prepare` computes from the step count."""

    def prepare(self, step: Expr) -> tuple[Expr, ...]:
        """The scalars, from the number of this step, counted from 1, as a float."""

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """The new parameter, then the new state."""

    def for_parameter(self, name: str, type: TensorType) -> tuple[Optimizer, float]:
        """The rule for one parameter, of the same state, and the factor of its learning rate."""

    def check_parameters(self, names: Iterable[str]) -> None:
        """Raise a UsageError if what the rule says of some parameters by name means none of these."""


@dataclass(frozen=True)
class Group:
    """Weights that an optimizer updates in a way of their own, such as `Group("head", rate=10.0)`.

    Attributes:
        weights: a pattern, or several: see `foreplan.patterns`. Of groups that mean the same weight, the one whose
            pattern is the most exact counts.
        rate: factor of the learning rate.
        weight_decay: theirs; None: the optimizer's.
    """

    weights: str | Sequence[str]
    rate: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        weights = (self.weights,) if isinstance(self.weights, str) else tuple(names_in("Group: weights", self.weights))
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "rate", number_in("Group: rate", self.rate, *_ANY))
        if self.weight_decay is not None:
            object.__setattr__(self, "weight_decay", number_in("Group: weight_decay", self.weight_decay, *_ANY))


_UNIT, _ANY = (0.0, 1.0), (0.0, float("inf"))
_LIMITS = {"clip_norm": (math.ulp(0.0), float("inf")), "learning_rate": _ANY, "weight_decay": _ANY, "epsilon": _ANY}
_LIMITS |= {"momentum": _UNIT, "beta1": _UNIT, "beta2": _UNIT}


@dataclass(frozen=True)
class _Common:
    """What all optimizers share: clipping by global norm (Pascanu, Mikolov and Bengio 2013), groups, checks of numbers.

    Attributes:
        clip_norm: g ← g · min(1, clip_norm / ‖g‖), ‖g‖ the norm of all gradients together; None: no clipping.
        decay: the weights that weight decay shrinks: "all", as in the papers; "matrices", those with two axes or more,
            which leaves out biases, and scales of normalisations; or patterns.
        groups: weights with a learning rate or a weight decay of their own. Their weight decay counts before `decay`.
    """

    clip_norm: float | None = field(default=None, kw_only=True)
    decay: str | Sequence[str] = field(default="all", kw_only=True)
    groups: Sequence[Group] = field(default=(), kw_only=True)
    state: ClassVar[tuple[str, ...]] = ()
    scalars: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in [each.name for each in fields(self) if each.name in _LIMITS]:
            given = getattr(self, name)
            if name != "clip_norm" or given is not None:
                value = number_in(f"{type(self).__name__}: {name}", given, *_LIMITS[name])
                object.__setattr__(self, name, value)  # NumPy's numbers would take over in a product with an Expr
        self._check_groups()

    def _check_groups(self) -> None:
        kind = type(self).__name__
        if isinstance(self.decay, str):
            choice(f"{kind}: decay", self.decay, ("all", "matrices"))
        else:
            object.__setattr__(self, "decay", tuple(names_in(f"{kind}: decay", self.decay)))
        if not isinstance(self.groups, Group | Iterable) or isinstance(self.groups, str):
            raise UsageError(
                f'{kind}: groups is a list such as [optim.Group("head", rate=10.0)], not {self.groups!r:.80}'
            )
        given = (self.groups,) if isinstance(self.groups, Group) else tuple(self.groups)
        for group in given:
            instance(f"{kind}: a group", group, Group, 'make one with optim.Group("head", rate=10.0)')
            if group.weight_decay is not None and not hasattr(self, "weight_decay"):
                raise UsageError(f"{kind} has no weight decay, and the group of {group.weights} wants one")
        object.__setattr__(self, "groups", given)

    def for_parameter(self, name: str, type: TensorType) -> tuple[Self, float]:
        """The rule for one parameter, and the factor of its learning rate."""
        found = most_exact(name, [pattern for group in self.groups for pattern in group.weights])
        group = next((group for group in self.groups if not set(found).isdisjoint(group.weights)), Group(""))
        own = decay = getattr(self, "weight_decay", 0.0)
        if group.weight_decay is not None:
            decay = group.weight_decay
        elif self.decay == "matrices":
            decay *= type.rank >= 2
        elif self.decay != "all":
            decay *= any(matches(name, pattern) for pattern in self.decay)
        return self if decay == own else replace(self, weight_decay=decay), group.rate  # type: ignore[call-arg]

    def check_parameters(self, names: Iterable[str]) -> None:
        """Check that all patterns mean parameters.

        Raises:
            UsageError: one means none of these; says which names come close.
        """
        patterns = [pattern for group in self.groups for pattern in group.weights]
        patterns += () if isinstance(self.decay, str) else self.decay
        trained = list(names)
        for pattern in patterns:
            if not any(matches(name, pattern) for name in trained):
                raise UsageError(
                    f"{type(self).__name__}: {pattern!r} means no weight that is trained; there are "
                    f"{close_names(pattern, trained)}"
                )

    def prepare(self, step: Expr) -> tuple[Expr, ...]:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class SGD(_Common):
    """p ← p − η·(g + λ·p) (Robbins and Monro 1951; η learning rate, λ weight decay)."""

    learning_rate: float
    weight_decay: float = 0.0

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """One step."""
        return (parameter - rate * (gradient + self.weight_decay * parameter),)


@dataclass(frozen=True)
class Momentum(_Common):
    """v ← μ·v + g + λ·p, p ← p − η·v (Polyak 1964, in the form of Sutskever et al. 2013 that frameworks use)."""

    learning_rate: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    state = ("velocity",)

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
class Adam(_Common):
    """Adam (Kingma and Ba 2015, algorithm 1); weight decay, if any, is added to the gradient."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    state = ("first_moment", "second_moment")
    scalars = ("correction1", "correction2")

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

    def __init__(
        self, b: Builder, optimizer: Optimizer, micro_batches: Value | None = None, scale: LossScale | None = None
    ) -> None:
        """
        Args:
            b: where nodes are added.
            optimizer: the rule.
            micro_batches: a float32 scalar: how many gradients each one given is the sum of. It is then an ACCUMULATOR,
                which the update divides by their number and clears.
            scale: the factor by which gradients are too large; if one of them is not finite, nothing is updated.
        """
        self.b, self.optimizer, self.count, self.scale = b, optimizer, micro_batches, scale
        self.updates: dict[Value, Value] = {}
        self.waiting: list[tuple[Value, Value]] = []  # parameters and gradients, until all gradients' norm is known
        self.squares: list[Value] = []
        self.seen: list[str] = []
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
        """Add the update of one parameter, or keep it for the end if it needs a number of all gradients."""
        self.seen.append(parameter.name)
        if self.optimizer.clip_norm is None and self.scale is None:
            self._update(parameter, gradient)
        else:
            self.waiting.append((parameter, gradient))
            self.squares.append(_sum_of_squares(self.b, gradient))

    def _update(self, parameter: Value, gradient: Value, factor: Value | None = None, ok: Value | None = None) -> None:
        n = len(self.optimizer.state)
        state = [
            self.b.store(f"{parameter.name}/{name}", parameter.type, Kind.STATE, Fill(0))
            for name in self.optimizer.state
        ]
        inputs = [parameter, gradient, *state, self.rate, *self.scalars, *([] if factor is None else [factor])]
        if self.count is not None:
            inputs.append(self.count)
        args = [_as(Arg(i), value, parameter) for i, value in enumerate(inputs)]
        scalars = tuple(args[3 + n : 3 + n + len(self.scalars)])
        mean = args[1] if self.count is None else args[1] / args[-1]
        clipped = mean if factor is None else mean * args[3 + n + len(self.scalars)]
        rule, factor_of_rate = self.optimizer.for_parameter(parameter.name, parameter.type)
        rate = args[2 + n] if factor_of_rate == 1.0 else args[2 + n] * factor_of_rate
        exprs = rule.update(args[0], clipped, tuple(args[2 : 2 + n]), rate, scalars)
        changed = [parameter, *state]
        if ok is not None:
            exprs = tuple(where(Arg(len(inputs)), new, old) for new, old in zip(exprs, (args[0], *args[2 : 2 + n])))
            inputs.append(ok)
        if gradient.kind is Kind.ACCUMULATOR:
            exprs, changed = (*exprs, zero(gradient)), [*changed, gradient]
        names = [f"{value.name}/next" for value in changed]
        new = elementwise_many(self.b, exprs, *inputs, name="update", outputs=names)
        self.updates |= dict(zip(changed, new))

    def finish(self) -> dict[Value, Value]:
        """Every stored value's content for the next step, after adding the updates that had to wait.

        Raises:
            UsageError: a pattern of the optimizer means no parameter.
        """
        self.optimizer.check_parameters(self.seen)
        if self.waiting:
            b, total = self.b, self._sum_of_all_squares()
            factor = self._factor(total)
            ok = None if self.scale is None else is_finite(b, total)
            for parameter, gradient in self.waiting:
                b.scope = f"{parameter.name}/"
                self._update(parameter, gradient, factor, ok)
            b.scope = ""
            if self.scale is not None and ok is not None:
                self.updates |= self.scale.updates(b, ok)
                of = (ok, self.updates[self.step], self.step)
                self.updates[self.step] = elementwise(b, where(Arg(0), Arg(1), Arg(2)), *of, name="step/next")
        return self.updates

    def _sum_of_all_squares(self) -> Value:
        """Of the gradients that wait."""
        total = self.squares[0]
        for square in self.squares[1:]:
            total = elementwise(self.b, lambda x, y: x + y, total, square, name="square_sum")
        nbytes = sum(gradient.type.nbytes for _, gradient in self.waiting if gradient.kind is not Kind.ACCUMULATOR)
        if nbytes:
            why, known = "clipping by global norm", "their norm is known"
            if self.scale is not None:
                why, known = "loss scaling", "it is known that they are finite"
            self.b.note(f"{why}: all gradients, {format_bytes(nbytes)}, are alive until {known}")
        return total

    def _factor(self, total: Value) -> Value:
        """The factor of gradients: min(1, clip_norm / ‖g‖), divided by their scale if they have one."""
        limit = self.optimizer.clip_norm
        scale = None if self.scale is None else self.scale.scale
        larger = [each for each in (self.count, scale) if each is not None]

        def factor(square: Expr, *scalars: Expr) -> Expr:
            by = None if self.scale is None else cast(scalars[-1], FLOAT64)
            if limit is None:
                assert by is not None
                return 1.0 / by
            size = sqrt(square)
            for times in scalars:
                size = size / cast(times, FLOAT64)
            clipped = Const(float(limit)) / maximum(size, Const(float(limit)))
            return clipped if by is None else clipped / by

        return elementwise(
            self.b, factor, total, *larger, name="clip_factor" if limit is not None else "unscale_factor"
        )


def zero(like: Value) -> Expr:
    """The number that clears a value of that element type."""
    return cast(Const(0.0), like.dtype)


def _sum_of_squares(b: Builder, x: Value) -> Value:
    """Σ x² as a float64 scalar: products of rows with themselves, so that no square is kept, added in pairs."""
    row = 1
    for extent in reversed(x.shape):
        if row * extent > ROW:
            break
        row *= extent
    rows = x.type.size // max(1, row)
    dots = matmul(b, reshape(b, x, (rows, 1, row)), reshape(b, x, (rows, row, 1)))
    return convert(b, reduce(b, "sum", dots), FLOAT64)


def _as(arg: Arg, value: Value, like: Value) -> Expr:
    """The argument in the parameter's own element type, so that the update keeps that type."""
    return arg if value.dtype == like.dtype else cast(arg, like.dtype)
