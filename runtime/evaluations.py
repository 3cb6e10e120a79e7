"""Evaluations beside a session's step: programs that read its weights and run in its arena, each bound once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from foreplan.arguments import names_in
from foreplan.errors import InputError
from foreplan.lower.program import Program
from foreplan.planner import Plan
from foreplan.runtime.result import Result

Bound = TypeVar("Bound")
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


class MakeStep(Protocol):
    """What compiles the same step for another batch, in no more memory."""

    def __call__(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Program, Plan]:
        """Of inputs of these shapes, by name."""


@dataclass(frozen=True)
class Beside:
    """What compiles the programs that run beside a step, in its memory."""

    evaluation: Make
    step: MakeStep


@dataclass
class Evaluations(Generic[Bound]):
    """Those of one session.

    Attributes:
        make: compiles one.
        bound: those that were asked for, each bound: one for each set of shapes, outputs and metrics.
    """

    make: Make
    bound: dict[Any, tuple[Evaluation, Bound]] = field(default_factory=dict)

    def find(
        self,
        given: Mapping[str, Any],
        outputs: Iterable[str] | None,
        metrics: Metrics,
        bind: Callable[[Program, Plan], Bound],
    ) -> tuple[Evaluation, Bound]:
        """The one for some arrays, compiled and bound when it is first asked for.

        Raises:
            InputError, UsageError, UnsupportedError, DoesNotFitError: see `Session.evaluate`.
        """
        shapes = {str(name): shape_of(name, array) for name, array in given.items()}
        names = None if outputs is None else tuple(names_in("outputs", outputs))
        chosen = metrics if isinstance(metrics, Mapping) else {name: name for name in names_in("metrics", metrics)}
        key = tuple(sorted(shapes.items())), names, tuple(chosen.items())
        if key not in self.bound:
            made = self.make(shapes, names, chosen)
            self.bound[key] = made, bind(made.program, made.plan)
        return self.bound[key]


def shape_of(name: str, array: Any) -> tuple[int, ...]:
    """The shape of what was given as an array."""
    try:
        return tuple(int(extent) for extent in (array.shape if hasattr(array, "shape") else np.shape(array)))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name!r} cannot be made an array: {error}") from None
