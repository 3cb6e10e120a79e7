"""Programs beside a session's step, which run in its memory: evaluations, and the step for smaller batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from foreplan.base.arguments import names_in
from foreplan.lower.program import Program
from foreplan.planner import Plan
from foreplan.runtime.inputs import shape_of
from foreplan.runtime.result import Result

Bound = TypeVar("Bound")
Metrics = Iterable[str] | Mapping[str, Any]
MOST_EVALUATIONS = 32  # that a session keeps: a function that is made anew for each call is another metric each time


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


class MakeEvaluation(Protocol):
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

    evaluation: MakeEvaluation
    step: MakeStep


@dataclass
class Programs(Generic[Bound]):
    """Those of one session.

    Attributes:
        make: compiles them.
        trains: whether there are steps for smaller batches.
        evaluations: those that were asked for last, each bound, by shapes, outputs and metrics.
        steps: likewise, by shapes.
    """

    make: Beside
    trains: bool
    evaluations: dict[Any, tuple[Evaluation, Bound]] = field(default_factory=dict)
    steps: dict[Any, Bound] = field(default_factory=dict)

    def evaluation(
        self,
        given: Mapping[str, Any],
        outputs: Iterable[str] | None,
        metrics: Metrics,
        bind: Callable[[Program, Plan], Bound],
        drop: Callable[[Bound], None],
    ) -> tuple[Evaluation, Bound]:
        """The evaluation of some arrays, compiled and bound when it is first asked for.

        Args:
            bind, drop: what makes a session of it, and what is told of one that is no longer kept.

        Raises:
            InputError, UsageError, UnsupportedError, DoesNotFitError: see `Session.evaluate`.
        """
        shapes = {str(name): shape_of(name, array) for name, array in given.items()}
        names = None if outputs is None else tuple(names_in("outputs", outputs))
        chosen = metrics if isinstance(metrics, Mapping) else {name: name for name in names_in("metrics", metrics)}
        key = tuple(sorted(shapes.items())), names, tuple(chosen.items())
        found = self.evaluations.pop(key, None)
        if found is None:
            made = self.make.evaluation(shapes, names, chosen)
            found = made, bind(made.program, made.plan)
        self.evaluations[key] = found
        if len(self.evaluations) > MOST_EVALUATIONS:
            drop(self.evaluations.pop(next(iter(self.evaluations)))[1])
        return found

    def step(self, shapes: Mapping[str, tuple[int, ...]], bind: Callable[[Program, Plan], Bound]) -> Bound:
        """The training step for inputs of these shapes, likewise.

        Raises:
            UsageError, UnsupportedError, DoesNotFitError: there is none.
        """
        key = tuple(sorted(shapes.items()))
        if key not in self.steps:
            self.steps[key] = bind(*self.make.step(shapes))
        return self.steps[key]
