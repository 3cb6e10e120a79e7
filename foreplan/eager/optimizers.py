"""What PyTorch's optimizers keep, and what their steps hold for a moment, parameter by parameter or all at once.

References: `torch/optim/sgd.py`, `adam.py`, `adamw.py`, `rmsprop.py`, `adagrad.py` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreplan.eager.autograd import Tape
from foreplan.eager.storage import Tensor, Use
from foreplan.errors import UsageError
from foreplan.graph.types import FLOAT32


@dataclass(frozen=True)
class Rule:
    """The step of an optimizer.

    Attributes:
        state: names of the tensors that it keeps for a parameter.
        counts: whether it keeps a number for each parameter too, on the host.
        temporaries: of a parameter's size: how many come to be, one after the other, each beside the one before; the
            last lives until the next parameter's has been made.
        foreach: the same where all parameters are updated at once: how many of each live together.
    """

    state: tuple[str, ...] = ()
    counts: bool = False
    temporaries: int = 0
    foreach: int = 0


def rule_of(optimizer: Any) -> Rule:
    """The rule of one of `foreplan.optim`.

    Raises:
        UsageError: PyTorch has no such optimizer, or its step is not known here.
    """
    kind = type(optimizer).__name__
    decays = bool(getattr(optimizer, "weight_decay", 0.0))
    rules = {
        "SGD": Rule((), False, int(decays), int(decays)),
        "Momentum": Rule(("momentum_buffer",), False, int(decays), int(decays)),
        "Nesterov": Rule(("momentum_buffer",), False, 1 + decays, int(decays)),
        "Adam": Rule(("exp_avg", "exp_avg_sq"), True, 2 + decays, 1 + decays),
        "AdamW": Rule(("exp_avg", "exp_avg_sq"), True, 2, 1),
        "RMSprop": Rule(("square_avg",), True, 1 + decays, 1 + decays),
        "Adagrad": Rule(("sum",), True, 1 + decays, 1 + decays),
    }
    if kind not in rules:
        raise UsageError(
            f"the step of {kind} in PyTorch is not known here; as PyTorch, a step takes one of {', '.join(rules)}"
        )
    return rules[kind]


@dataclass(eq=False)
class Stepper:
    """`optimizer.step()`, and the state between its calls."""

    tape: Tape
    rule: Rule
    parameters: Sequence[Tensor]
    foreach: bool

    def __post_init__(self) -> None:
        self.state: dict[Tensor, list[Tensor]] = {}

    def zero_grad(self, to_none: bool) -> None:
        """Drop the gradients, or fill them with zeros."""
        if to_none:
            for parameter in self.parameters:
                parameter.grad = None

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        updated = [parameter for parameter in self.parameters if parameter.grad is not None]
        memory = self.tape.memory
        if self.foreach:
            for parameter in updated:
                self.keep(parameter)
            memory.use = Use.TEMPORARY
            held = [
                self.tape.like(parameter, "temporary of the step")
                for _ in range(self.rule.foreach)
                for parameter in updated
            ]
            del held
        else:
            self.one_by_one(updated)
        memory.use, memory.node = Use.ACTIVATION, ""

    def one_by_one(self, updated: Sequence[Tensor]) -> None:
        """For each parameter its state and its temporaries."""
        last: Tensor | None = None
        memory = self.tape.memory
        if self.rule.counts:
            for parameter in updated:
                self.keep(parameter)
        for parameter in updated:
            if self.rule.state == ("momentum_buffer",):
                last = None
            self.keep(parameter)
            memory.use = Use.TEMPORARY
            for _ in range(self.rule.temporaries):
                last = self.tape.like(parameter, "temporary of the step")

    def keep(self, parameter: Tensor) -> None:
        """Make the state of a parameter, the first time."""
        if parameter in self.state:
            return
        memory = self.tape.memory
        memory.use, memory.node = Use.STATE, memory.blocks[parameter.storage.index].name
        kept = [self.tape.like(parameter, name) for name in self.rule.state]
        if self.rule.counts and not self.tape.cuda:
            kept.append(self.tape.new((), FLOAT32, "step"))
        self.state[parameter] = kept
