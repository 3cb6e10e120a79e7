"""The largest batch with which a step fits a memory, in parts and recomputing where that helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from foreplan.base.errors import DoesNotFitError, UnsupportedError
from foreplan.base.units import format_bytes
from foreplan.compiler.compiled import Compiled
from foreplan.compiler.prices import base_nanoseconds, is_dear
from foreplan.fit.fitting import largest, needed_bytes
from foreplan.fit.pareto import Form, Forms, affordable
from foreplan.lower.outside import Use, beside

SCOUTS = (1, 8)  # batches that show what a sample takes
MOST = 1 << 16  # no larger batch is tried


@dataclass(frozen=True)
class Trial:
    """A batch that was tried.

    Attributes:
        needed: bytes of the smallest plan found, as `needed_bytes` has them; at most the memory where one fits.
        step: the step that fits, with its plan; None: none does.
    """

    needed: int
    step: Compiled | None


class Trials:
    """Batches tried against a memory.

    Attributes:
        tried: by batch.
    """

    def __init__(
        self,
        compile_at: Callable[[int], Compiled],
        memory: int,
        share: float | None = None,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Nothing is tried yet.

        Args:
            compile_at: the step at a batch, with nothing recomputed that its options do not name.
            memory: bytes, of the whole card or of the arena on the host.
            share: of the time of the fastest kernels without recomputation, what may be added, such as 0.05; None: any.
            told: is given a line for each batch that was tried.
        """
        self.compile_at, self.memory, self.share, self.told = compile_at, memory, share, told
        self.tried: dict[int, Trial] = {}
        self._compiled: dict[int, Compiled] = {}
        self._forms: dict[int, Forms] = {}
        self._found: dict[Form, Trial | None] = {}

    def largest(self, first: int | None = None) -> int:
        """The largest batch found that fits; the next larger one was tried and does not, or is beyond MOST. 0: not even
        one sample does.

        Args:
            first: the batch to try first.
        """
        small, large = (needed_bytes(self._compile(batch), self.memory) for batch in SCOUTS)
        slope = max((large - small) // (SCOUTS[1] - SCOUTS[0]), 1)
        fixed = max(small - slope * SCOUTS[0], 0)
        about = max((self.memory - fixed) // slope, 1)
        if self.share != 0 and not self._compile(SCOUTS[0]).options.checkpoint:
            about *= 2  # what the planner may recompute takes about half
        return largest(self.needed, self.memory, min(first or about, MOST), fixed)

    def needed(self, batch: int) -> int:
        """Bytes of the smallest plan found, at most the memory where a plan within the limits fits."""
        if batch > MOST:
            return self.memory + 1
        if batch not in self.tried:
            try:
                found = self._try(batch)
            except UnsupportedError as error:  # no kernel takes tensors of that size
                found = Trial(self.memory + 1, None)
                self.told(f"batch {batch:,}: {error}")
            else:
                fits = "fits" if found.step else f"needs {format_bytes(found.needed)}"
                self.told(f"batch {batch:,} {fits}")
            self.tried[batch] = found
        return self.tried[batch].needed

    def _compile(self, batch: int) -> Compiled:
        if batch not in self._compiled:
            self._compiled[batch] = self.compile_at(batch)
        return self._compiled[batch]

    def _try(self, batch: int) -> Trial:
        """The first form of the step at a batch that fits."""
        compiled = self._compile(batch)
        needed = needed_bytes(compiled, self.memory)
        if needed <= self.memory:
            return Trial(needed, compiled)
        if self.share == 0 or compiled.options.checkpoint:
            return Trial(needed, None)
        for form in self._forms_at(batch):
            trial = self._in_form(form, compiled)
            if trial is None:
                continue
            needed = min(needed, trial.needed)
            if trial.step is not None:
                return Trial(needed, trial.step)
        return Trial(needed, None)

    def cheapest(self, batch: int) -> Compiled:
        """The step at a batch that fits, in the form in which it takes the least time."""
        compiled, step = self._compile(batch), self.tried[batch].step
        assert step is not None
        if step is compiled:
            return step
        found = []
        for form in self._forms_at(batch):
            trial = self._in_form(form, compiled)
            if trial is None or trial.step is None:
                continue
            found.append(trial.step)
            if form.step is compiled and not is_dear(compiled.program, trial.step.plan):
                break
        return min(found, key=lambda each: each.program.costs(each.plan).nanoseconds)

    def _forms_at(self, batch: int) -> Forms:
        if batch not in self._forms:
            self._forms[batch] = Forms(self._compile(batch), self.memory)
        return self._forms[batch]

    def _in_form(self, form: Form, whole: Compiled) -> Trial | None:
        """A form of a step within the memory; None: it takes more time than is allowed, whatever it recomputes.

        Args:
            whole: the step as it is, which does not fit without recomputation.
        """
        if form not in self._found:
            self._found[form] = self._look(form, whole)
        return self._found[form]

    def _look(self, form: Form, whole: Compiled) -> Trial | None:
        base, program = form.step, form.step.program
        most = None if self.share is None else int((1 + self.share) * base_nanoseconds(whole.program))
        if base is not whole:
            if most is not None and program.costs(base.plan).nanoseconds > most:
                return None
            if (needed := needed_bytes(base, self.memory)) <= self.memory:
                return Trial(needed, base)
        if (least := base.plan.order_lower_bound_bytes or 0) > self.memory:
            return Trial(least, None)
        curve, update = affordable(form.curve, most), base.update
        other = None if update is None else (update.program, update.plan)
        try:
            found = curve.within(self.memory, beside(program, Use(other=other)))
        except DoesNotFitError as error:
            return Trial(needed_bytes(replace(base, plan=error.plan), self.memory), None)
        step = replace(base, plan=found)
        needed = needed_bytes(step, self.memory)
        if needed > self.memory:  # the other half does not fit
            return Trial(needed, None)
        smallest = needed - found.arena_bytes + min([point.bound for point in curve.points], default=found.arena_bytes)
        return Trial(min(needed, smallest), step)
