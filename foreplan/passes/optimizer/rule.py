"""The base of all optimizers: what they state, what each user may choose of any, and the weights that patterns name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Protocol, Self

from foreplan.base.arguments import choice, instance, names_in, number_in
from foreplan.base.errors import UsageError
from foreplan.base.patterns import close_names, matches, most_exact
from foreplan.graph import TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.expr import Expr
from foreplan.passes.optimizer.schedule import Schedule
from foreplan.passes.optimizer.site import Site

Exprs = tuple[Expr, ...]


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for one parameter.

    Attributes:
        name: after the parameter's.
        type: its shape and element type.
        first: what it is full of before the first step.
    """

    name: str
    type: TensorType
    first: float = 0.0


class Rule(Protocol):
    """The update of one parameter."""

    @property
    def by_element(self) -> bool:
        """Whether each new element follows from that element's gradient, weight and state alone."""

    def kept(self, type: TensorType) -> tuple[StateTensor, ...]:
        """The state of a parameter of that type."""

    def add(self, site: Site) -> None:
        """Add the nodes that compute the new parameter and the new state, and write them (`Site.write`)."""


class Optimizer(Protocol):
    """A rule for each parameter, and what they all share."""

    @property
    def learning_rate(self) -> float | Schedule:
        """Default of the step's input of that name; or how it follows from the number of updates."""

    @property
    def clip_norm(self) -> float | None:
        """If the norm of all gradients together is larger than this, they are scaled down to it; None: never."""

    @property
    def clip_value(self) -> float | None:
        """Elements of gradients are limited to this magnitude; None: they are not."""

    @property
    def ema(self) -> float | None:
        """The decay of a running average of each parameter; None: there is none."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars, the same for all parameters, that `prepare` computes from the step count."""

    @property
    def products(self) -> tuple[str, ...]:
        """Names of further scalars: numbers that are kept from step to step, each 1 at first."""

    def prepare(self, step: Expr, *products: Expr) -> Exprs:
        """The scalars, from the number of this step, counted from 1, and the products so far; then the new products.

        All are of type float64.
        """

    def for_parameter(self, name: str, type: TensorType) -> tuple[Rule, float]:
        """The rule for one parameter, and the factor of its learning rate."""

    def check_parameters(self, names: Iterable[str]) -> None:
        """Raise a UsageError if what the optimizer says of some parameters by name means none of these."""


@dataclass(frozen=True)
class Group:
    """Weights that an optimizer updates in a way of their own, such as `Group("head", rate=10.0)`.

    Attributes:
        weights: a pattern, or several: see `foreplan.base.patterns`. Of groups that mean the same weight, the one whose
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


_UNIT, _ANY, _ABOVE_0 = (0.0, 1.0), (0.0, FLOAT32.largest), (math.ulp(0.0), FLOAT32.largest)
_LIMITS = dict.fromkeys(("momentum", "alpha", "beta1", "beta2", "ema"), _UNIT)
_LIMITS |= dict.fromkeys(("learning_rate", "weight_decay", "epsilon", "epsilon1", "epsilon2", "initial"), _ANY)
_LIMITS |= dict.fromkeys(("momentum_decay", "adamw_rate"), _ANY)
_LIMITS |= dict.fromkeys(("clip_norm", "clip_value"), _ABOVE_0)
_LIMITS["clip_update"] = (1.0, FLOAT32.largest)
_LIMITS["beta2_decay"] = (-FLOAT32.largest, math.ulp(0.0))


@dataclass(frozen=True)
class Common:
    """What all optimizers share: clipping, averages of weights, groups, checks of numbers.

    Attributes:
        clip_norm: g ← g · min(1, clip_norm / ‖g‖), ‖g‖ the norm of all gradients together (Pascanu, Mikolov and Bengio
            2013); None: no clipping.
        clip_value: every element of every gradient is limited to [-clip_value, clip_value]; None: it is not.
        decay: the weights that weight decay shrinks: "all", as in the papers; "matrices", those with two axes or more,
            which leaves out biases, and scales of normalisations; or patterns.
        groups: weights with a learning rate or a weight decay of their own. Their weight decay counts before `decay`.
        ema: keep a running average a of each trained weight p: a ← ema · a + (1 − ema) · p after each update, and a = p
            after the first (Polyak and Juditsky 1992). `Session.averaged` and `Session.save(ema=True)` use it.
    """

    clip_norm: float | None = field(default=None, kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    decay: str | Sequence[str] = field(default="all", kw_only=True)
    groups: Sequence[Group] = field(default=(), kw_only=True)
    ema: float | None = field(default=None, kw_only=True)
    scalars: ClassVar[tuple[str, ...]] = ()
    products: ClassVar[tuple[str, ...]] = ()
    by_element: ClassVar[bool] = False  # whether a part of a weight can be updated without the rest

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for each in fields(self):
            given = getattr(self, each.name)
            if each.name not in _LIMITS or isinstance(given, Schedule) or (given is None and each.default is None):
                continue
            value = number_in(f"{kind}: {each.name}", given, *_LIMITS[each.name])
            object.__setattr__(self, each.name, value)  # NumPy's numbers would take over in a product with an Expr
        if self.clip_norm is not None and self.clip_value is not None:
            raise UsageError(f"{kind}: clip_norm and clip_value both limit gradients: give one")
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

    def patterns(self) -> list[str]:
        """All patterns that name weights."""
        patterns = [pattern for group in self.groups for pattern in group.weights]
        return patterns if isinstance(self.decay, str) else [*patterns, *self.decay]

    def check_parameters(self, names: Iterable[str]) -> None:
        """Check that all patterns mean parameters.

        Raises:
            UsageError: one means none of these; says which names come close.
        """
        trained = list(names)
        for pattern in self.patterns():
            if not any(matches(name, pattern) for name in trained):
                raise UsageError(
                    f"{type(self).__name__}: {pattern!r} means no weight that is trained; there are "
                    f"{close_names(pattern, trained)}"
                )

    def prepare(self, step: Expr, *products: Expr) -> Exprs:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class Elementwise(Common):
    """An optimizer of which each new element follows from that element's gradient, weight and state alone."""

    by_element: ClassVar[bool] = True

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors that are kept for each parameter, of its shape."""
        return ()

    def kept(self, type: TensorType) -> tuple[StateTensor, ...]:
        """The state of a parameter of that type: zero at first."""
        return tuple(StateTensor(name, type) for name in self.state)

    def update(self, parameter: Expr, gradient: Expr, state: Exprs, rate: Expr, scalars: Exprs) -> Exprs:
        """The new parameter, then the new state."""
        raise NotImplementedError

    def add(self, site: Site) -> None:
        """One map over the parameter's elements."""
        n = len(site.state)

        def new(parameter: Expr, gradient: Expr, *others: Expr) -> Exprs:
            return self.update(parameter, gradient, others[:n], others[n], others[n + 1 :])

        changed = (site.parameter, *site.state)
        site.write(new, changed, site.parameter, site.gradient, *site.state, site.rate, *site.scalars)


def check_by_element(rule: Rule, name: str, whole: str) -> None:
    """Check that an optimizer's rule can update a part of a tensor by itself.

    Args:
        whole: the option under which ranks have whole tensors.

    Raises:
        UsageError: it cannot.
    """
    if not rule.by_element:
        raise UsageError(
            f"{type(rule).__name__} computes with whole tensors, such as {name!r}, of which each rank would have a "
            f"part: take {whole}, or an optimizer such as AdamW"
        )
