"""What to do about a step that does not fit its card, computed: a smaller batch, a budget, a narrower precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from foreplan.base.errors import DoesNotFitError, ForeplanError
from foreplan.base.units import as_size
from foreplan.compiler.compiled import Compiled
from foreplan.fit.fitting import largest, needed_bytes
from foreplan.options import Options

CompileAt = Callable[[int, Options], Compiled]  # the step of a model at a batch, with other options


@dataclass(frozen=True)
class Remedy:
    """One change with which a step fits its card; the other options stay.

    Attributes:
        batch: of the step.
        whole_bytes: that the step takes on the card.
        predicted_seconds: of the step.
        extra_seconds_ratio: of that, what recomputation adds; see `Compiled.estimate`.
        budget: as `compile` takes it; None: the options' own.
        precision: likewise.
    """

    batch: int
    whole_bytes: int
    predicted_seconds: float
    extra_seconds_ratio: float
    budget: str | None = None
    precision: str | None = None

    @classmethod
    def of(cls, step: Compiled, batch: int, **changed: str) -> Remedy:
        """A step that fits, and how it came about."""
        figures = step.estimate()
        return cls(
            batch,
            figures["whole_bytes"],
            figures["predicted_seconds"],
            figures["extra_seconds_ratio"],
            **changed,
        )

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without those that stay."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        """`batch 36`, `--budget 13.9GiB (+4 % time)` or `bf16 at batch 58`."""
        if self.budget is not None:
            return f"--budget {self.budget} ({100 * self.extra_seconds_ratio:+.0f} % time)"
        return f"batch {self.batch}" if self.precision is None else f"{self.precision} at batch {self.batch}"


def remedies(step: Compiled, batch: int | None, compile_at: CompileAt) -> Iterator[Remedy]:
    """What makes a step fit its card, each change by itself, as it is found: the largest batch with the same options;
    at the same batch, the cheapest plan within the card's memory; and the largest batch in the narrower precision that
    the card computes in. A change with which nothing fits is left out. Where what the step keeps from step to step is
    larger than the card, nothing is tried.

    Args:
        step: the step that does not fit.
        batch: its batch; None: it has no single one, so that the batch stays.
        compile_at: compiles the same model again.
    """
    memory = step.verdict.device_bytes
    if memory is None or batch is None or step.verdict.fits or step.memory.persistent > memory:
        return
    search = _Search(step, batch, memory, compile_at)
    if (smaller := search.smaller_batch()) is not None:
        yield smaller
    if (within := search.within_budget()) is not None:
        yield within
    if (narrower := search.narrower(2 * smaller.batch if smaller else batch)) is not None:
        yield narrower


@dataclass(frozen=True)
class _Search:
    step: Compiled
    batch: int
    memory: int
    compile_at: CompileAt

    def smaller_batch(self) -> Remedy | None:
        """The largest batch that fits, with the same options."""
        return self._largest(self.step.options, {self.batch: self.step}, self.batch)

    def within_budget(self) -> Remedy | None:
        """The same batch, with as little recomputation as the card's memory makes necessary."""
        options = self.step.options
        if options.checkpoint:  # it says what is recomputed, and the planner chooses nothing
            return None
        try:
            found = self.compile_at(self.batch, replace(options, budget=self.memory))
        except DoesNotFitError:
            return None
        return Remedy.of(found, self.batch, budget=as_size(found.verdict.whole_bytes, self.memory))

    def narrower(self, first: int) -> Remedy | None:
        """The largest batch in two bytes an element, where the step computes in four.

        Args:
            first: the batch to try first.
        """
        options, profile = self.step.options, self.step.program.profile
        narrow = "" if profile is None else profile.narrow
        if options.precision != "float32" or not narrow:
            return None
        return self._largest(replace(options, precision=narrow), {}, first, precision=narrow)

    def _largest(self, options: Options, known: dict[int, Compiled], first: int, **changed: str) -> Remedy | None:
        """The largest batch found that fits with some options; the next larger one was tried and does not."""
        steps: dict[int, Compiled] = dict(known)
        over: dict[int, int] = {}  # by batch that has no plan within a budget of the options, the bytes it needs

        def needed(batch: int) -> int:
            if batch not in steps and batch not in over:
                try:
                    steps[batch] = self.compile_at(batch, options)
                except DoesNotFitError as error:
                    over[batch] = max(error.needed, self.memory + 1)
            return needed_bytes(steps[batch], self.memory) if batch in steps else over[batch]

        memory = self.step.memory
        try:
            batch = largest(needed, self.memory, first, memory.persistent + memory.peak - memory.arena)
        except ForeplanError:  # the model has no other batch, or the step no such precision
            return None
        return Remedy.of(steps[batch], batch, **changed) if batch else None
