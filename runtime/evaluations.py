"""Evaluations beside a session's step: programs that read its weights and run in its arena, each bound once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from foreplan.errors import InputError
from foreplan.lower.program import Program
from foreplan.planner import Plan
from foreplan.runtime.result import Result

if TYPE_CHECKING:
    from foreplan.runtime.session import Session

Metrics = Iterable[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """A program that evaluates, and its plan.

    Attributes:
        program, plan: what runs.
        loss: which of its outputs is the loss; None: it has none.
        metrics: which of its outputs are metrics.
    """

    program: Program
    plan: Plan
    loss: str | None
    metrics: tuple[str, ...]

    def result(self, found: Result) -> Result:
        """What an evaluation returns, from what the program does."""
        rest = dict(found.outputs)
        loss = None if self.loss is None else float(rest.pop(self.loss))
        metrics = {name: float(rest.pop(name)) for name in self.metrics}
        return Result(loss, rest, metrics=metrics)


class Make(Protocol):
    """What compiles an evaluation, in no more memory than a step's arena has."""

    def __call__(
        self, shapes: Mapping[str, tuple[int, ...]], outputs: Iterable[str] | None, metrics: Metrics
    ) -> Evaluation:
        """Of inputs of these shapes, by name."""


@dataclass
class Evaluations:
    """Those of one session.

    Attributes:
        make: compiles one.
        poison, capture: how they run: see `Session`.
        bound: those that were asked for, with their sessions: one for each set of shapes, outputs and metrics.
    """

    make: Make
    poison: bool
    capture: bool
    bound: dict[Any, tuple[Evaluation, Session]] = field(default_factory=dict)

    def find(
        self, training: Session, given: Mapping[str, Any], outputs: Iterable[str] | None, metrics: Metrics
    ) -> tuple[Evaluation, Session]:
        """The one for some arrays; the first time it is compiled, and bound to the memory of the session that trains.

        Raises:
            InputError, UsageError, UnsupportedError, DoesNotFitError: see `Session.evaluate`.
        """
        shapes = {str(name): _shape(name, array) for name, array in given.items()}
        names = None if outputs is None else (outputs,) if isinstance(outputs, str) else tuple(outputs)
        chosen = metrics if isinstance(metrics, Mapping) else tuple([metrics] if isinstance(metrics, str) else metrics)
        listed = tuple(chosen.items()) if isinstance(chosen, Mapping) else chosen
        key = tuple(sorted(shapes.items())), names, listed
        if key not in self.bound:
            made = self.make(shapes, names, chosen)
            session = type(training)(
                made.program, made.plan, share=training, poison=self.poison, capture=self.capture
            )
            self.bound[key] = made, session
        return self.bound[key]


def _shape(name: str, array: Any) -> tuple[int, ...]:
    """The shape of what was given as an array."""
    import numpy as np

    try:
        return tuple(int(extent) for extent in (array.shape if hasattr(array, "shape") else np.shape(array)))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name!r} cannot be made an array: {error}") from None
