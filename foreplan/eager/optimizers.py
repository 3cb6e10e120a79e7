"""What PyTorch's optimizers keep, and what their steps hold for a moment, parameter by parameter or all at once.

References: `torch/optim/sgd.py`, `adam.py`, `adamw.py`, `rmsprop.py`, `adagrad.py` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreplan.base.errors import UsageError
from foreplan.eager.autograd import Tape
from foreplan.eager.storage import Tensor, Use
from foreplan.graph.types import FLOAT32

Step = Callable[[Tape, Tensor, "Rule", dict[str, Tensor]], None]


@dataclass(frozen=True)
class Rule:
    """The step of an optimizer.

    Attributes:
        step: makes the temporaries of one parameter, within the variables of the loop over all.
        together: tensors of a parameter's size that each has beside it where all are updated at once.
        state: names of the tensors that it keeps for a parameter.
        counts: whether it keeps a number for each parameter too, on the host.
        decays: whether weight decay makes a tensor: the gradient with the parameter's share.
        early: whether the state is there before the first step.
    """

    step: Step
    together: int
    state: tuple[str, ...] = ()
    counts: bool = False
    decays: bool = False
    early: bool = False


def rule_of(optimizer: Any) -> Rule:
    """The rule of one of `foreplan.optim`.

    Raises:
        UsageError: PyTorch has no such optimizer, or its step is not known here.
    """
    kind = type(optimizer).__name__
    decays = bool(getattr(optimizer, "weight_decay", 0.0))
    averages = ("momentum_buffer",) * bool(getattr(optimizer, "momentum", 0.0)) + ("grad_avg",) * bool(
        getattr(optimizer, "centered", False)
    )
    buffer, moments = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")
    rules = {
        "SGD": Rule(_plain, int(decays), decays=decays),
        "Momentum": Rule(_plain, int(decays), buffer, decays=decays),
        "Nesterov": Rule(_nesterov, int(decays), buffer, decays=decays),
        "Adam": Rule(_adam, 1, moments, True, decays),
        "AdamW": Rule(_adam, 1, moments, True),
        "RMSprop": Rule(_root, 1 + decays, ("square_avg", *averages), True, decays),
        "Adagrad": Rule(_root, 2, ("sum",), True, decays, True),
    }
    if kind not in rules:
        raise UsageError(
            f"the step of {kind} in PyTorch is not known here; --as pytorch takes one of {', '.join(rules)}"
        )
    return rules[kind]


def not_counted(optimizer: Any) -> tuple[str, ...]:
    """What an optimizer is asked for that is not counted, for people."""
    found = []
    if getattr(optimizer, "clip_norm", None) is not None or getattr(optimizer, "clip_value", None) is not None:
        found.append("clipping holds some numbers for each gradient, which are not counted")
    if getattr(optimizer, "ema", None) is not None:
        found.append("PyTorch's optimizers keep no average of weights: that of ema is not counted")
    return tuple(found)


def _plain(tape: Tape, parameter: Tensor, rule: Rule, variables: dict[str, Tensor]) -> None:
    variables.pop("grad", None)
    if rule.decays:
        variables["grad"] = tape.like(parameter, "grad + decay")


def _nesterov(tape: Tape, parameter: Tensor, rule: Rule, variables: dict[str, Tensor]) -> None:
    _plain(tape, parameter, rule, variables)
    variables["grad"] = tape.like(parameter, "grad + momentum")


def _adam(tape: Tape, parameter: Tensor, rule: Rule, variables: dict[str, Tensor]) -> None:
    _plain(tape, parameter, rule, variables)
    root = tape.like(parameter, "root")
    variables["denom"] = tape.like(parameter, "denom")
    del root


def _root(tape: Tape, parameter: Tensor, rule: Rule, variables: dict[str, Tensor]) -> None:
    _plain(tape, parameter, rule, variables)
    variables["root"] = tape.like(parameter, "root")


@dataclass(eq=False)
class Stepper:
    """`optimizer.step()`, and the state between its calls."""

    tape: Tape
    rule: Rule
    parameters: Sequence[Tensor]
    foreach: bool
    state: dict[Tensor, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rule.early:
            self.keep(self.parameters)

    def zero_grad(self, to_none: bool) -> None:
        """Drop the gradients, or fill them with zeros."""
        if to_none:
            for parameter in self.parameters:
                parameter.grad = None

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        updated = [parameter for parameter in self.parameters if parameter.grad is not None]
        variables: dict[str, Tensor] = {}
        one_by_one = not self.foreach and not self.rule.counts  # else all state is made first
        if not one_by_one:
            self.keep(updated)
        held = []
        for parameter in updated:
            if one_by_one and self.rule.state:
                self.keep([parameter], variables)
            self.tape.memory.use = Use.TEMPORARY
            if self.foreach:
                held += [self.tape.like(parameter, "temporary of the step") for _ in range(self.rule.together)]
            else:
                self.rule.step(self.tape, parameter, self.rule, variables)
        self.tape.memory.use, self.tape.memory.node = Use.ACTIVATION, ""

    def keep(self, parameters: Sequence[Tensor], variables: dict[str, Tensor] | None = None) -> None:
        """Make the state of parameters, the first time."""
        memory = self.tape.memory
        for parameter in parameters:
            if variables:
                variables.pop("grad", None)
            memory.node = memory.blocks[parameter.storage.index].name
            if parameter in self.state:
                continue
            memory.use = Use.STATE
            kept = [self.tape.like(parameter, name) for name in self.rule.state]
            if self.rule.counts and not self.tape.cuda:
                kept.append(self.tape.new((), FLOAT32, "step"))
            self.state[parameter] = kept
