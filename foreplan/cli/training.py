"""A training run: its steps, what they give, what measures and logs them, and its checkpoint."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import ForeplanError
from foreplan.base.units import format_seconds
from foreplan.cli.data import Arrays, epoch, interruptible
from foreplan.cli.log import Log
from foreplan.cli.options import console, echo, working
from foreplan.cli.validation import Validation

if TYPE_CHECKING:
    import numpy as np

    from foreplan.cli.job import Share
    from foreplan.compiler.compiled import Compiled
    from foreplan.runtime.ranks import World
    from foreplan.runtime.session import Session

FIRST_STEPS = 10  # of a run, which are done again to find where a loss became nan
DIVERGED = "training has diverged; start from the last good checkpoint, or anew, with a lower --lr or with --clip-norm"


@dataclass
class Training:
    """How far a training run has come.

    Attributes:
        losses: of the steps of this run.
        seconds: of the same steps, each from when it was asked for to its result.
        validations: what was measured, each with the step after which it was.
        signal: what stopped it, or 0.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    signal: int = 0

    def as_json(self) -> dict[str, Any]:
        """What `train --json` prints."""
        return {
            "steps": len(self.losses),
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "losses": self.losses,
            "step_seconds_median": statistics.median(self.seconds) if self.seconds else None,
            "validations": self.validations,
            "interrupted": bool(self.signal),
        }


@dataclass
class Saving:
    """When and where a training run writes its checkpoint.

    Attributes:
        path: of the checkpoint; None: it is not written.
        adapters: folder for the model's adapters, written with it; None: they are not written.
        averages: of a file for the model with averages of its weights, likewise.
        every: steps from one writing to the next; None: it is written at the end alone.
        saved: the step after which it was last written by this run; None: it was not.
    """

    session: Session
    path: str | None
    every: int | None
    adapters: str | None = None
    averages: str | None = None
    saved: int | None = None

    def after(self, step: int) -> None:
        """Save if it is time to; steps are counted from 1."""
        if self.every is not None and step % self.every == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Write the checkpoint after a step, unless it is there.

        Raises:
            DivergedError: a parameter holds nan; the checkpoint before stays as it is.
            UsageError, SessionError: the file cannot be written; likewise.
        """
        import numpy as np

        if self.written is None or self.saved == step:
            return
        for name, array in self.session.parameters.items():
            if np.isnan(array).any():
                raise DivergedError(f"parameter {name!r} holds nan after step {step}: {DIVERGED}. {self.state()}")
        if self.path is not None:
            self.session.save(self.path)
        if self.adapters is not None:
            self.session.save_adapters(self.adapters)
        if self.averages is not None:
            self.session.save(self.averages, ema=True)
        self.saved = step

    def state(self) -> str:
        """What was written, for people."""
        return "No checkpoint was written" if self.saved is None else f"{self.written} holds step {self.saved}"

    @property
    def written(self) -> str | None:
        """What is written, for people; None: nothing."""
        return self.path or self.adapters or self.averages


@dataclass(frozen=True)
class Run:
    """What is run.

    Attributes:
        compiled: the step.
        saving: its session, and when that is written.
        arrays: all samples.
        samples: how many there are.
        size: how many a step takes, on all ranks together.
        micro_batches: of a step.
        first, last: the first step, and the one after the last.
        seed: of the order of samples.
        world: the ranks that run it.
        share: the samples of a step that this one takes.
        fixed: inputs that are the same in each step.
        validation: what measures the model after each epoch.
        logs: where the figures of each step are written.
        quiet: whether measured figures are printed at the end alone, or by another rank.
        anew: makes a session as this one was before its first step; None: it cannot be made.
    """

    compiled: Compiled
    saving: Saving
    arrays: Arrays
    samples: int
    size: int
    micro_batches: int
    first: int
    last: int
    seed: int
    world: World
    share: Share
    fixed: Arrays = field(default_factory=dict)
    validation: Validation | None = None
    logs: Sequence[Log] = ()
    quiet: bool = False
    anew: Callable[[], Session] | None = None

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return self.samples // self.size

    def train(self) -> Training:
        """Run the steps, whatever epochs they lie in; stops after a signal.

        Raises:
            DivergedError: a loss is not finite.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        training = Training()
        taken: deque[Mapping[str, np.ndarray]] = deque()  # by the step that runs, and by the next one
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        first = self.world.rank == 0
        shown = Progress(*columns, console=console(), redirect_stdout=False, disable=not first)
        with interruptible() as caught, shown as progress:
            task = progress.add_task("", total=self.last, completed=self.first)
            started = time.perf_counter()
            for index, result in enumerate(self.saving.session.steps(self._batches(taken)), self.first):
                loss, inputs, step = result.loss, taken.popleft(), index + 1
                assert loss is not None
                training.seconds.append(time.perf_counter() - started)
                training.losses.append(loss)
                epoch_of = index // self.per_epoch + 1
                text = f"epoch {epoch_of}  loss {loss:.4f}  {format_seconds(training.seconds[-1])} a step"
                progress.update(task, advance=1, description=text)
                if not math.isfinite(loss):
                    why = _why_diverged(self.arrays, inputs) or self._first_not_finite(step) + DIVERGED
                    raise DivergedError(f"the loss is {loss} at step {step}: {why}. {self.saving.state()}")
                # Ranks stop behind the same step.
                stopped = max(self.world.gather(caught[0] if caught else 0, f"the end of step {step}"))
                self.saving.after(step)
                figures = {"epoch": epoch_of, "loss": loss, "seconds": training.seconds[-1]}
                if self.validation is not None and (step % self.per_epoch == 0 or step == self.last or stopped):
                    measured = self.validation.measure()
                    training.validations.append({"step": step, **measured})
                    figures |= {f"validation_{name}": number for name, number in measured.items()}
                    self._tell(progress, f"epoch {epoch_of}, step {step}: {_listed(measured)}")
                for log in self.logs:
                    log.write(step, figures)
                if stopped:
                    training.signal = stopped
                    return training
                started = time.perf_counter()
        return training

    def _first_not_finite(self, step: int) -> str:
        """Which tensor was the first that was not finite, of a run of few steps: they are done again, and watched."""
        from foreplan.runtime.first_nan import not_finite

        count = step - self.first
        if self.anew is None or self.world.size > 1 or count > FIRST_STEPS:
            return ""
        try:
            with working("looking for the first tensor that is not finite"):
                session = self.anew()
                if session.steps_done != self.first:  # the checkpoint that it began with is written over
                    return ""
                found = not_finite(session, islice(self._batches(deque()), count))
        except (MemoryError, ForeplanError):  # what was found first is told in any case
            return ""
        return f"{found}; " if found else ""

    def _batches(self, taken: deque[Mapping[str, np.ndarray]]) -> Iterator[Arrays]:
        program, accumulate = self.compiled.program, self.micro_batches
        for number in range(self.first // self.per_epoch, math.ceil(self.last / self.per_epoch)):
            of_epoch = epoch(program, self.arrays, self.samples, self.size, self.seed, number, accumulate, self.share)
            for i, inputs in enumerate(of_epoch, number * self.per_epoch):
                if self.first <= i < self.last:
                    taken.append(inputs)
                    yield {**self.fixed, **inputs}

    def _tell(self, progress: Any, text: str) -> None:
        """Print a line on standard output; above the progress bar, where both are on a terminal."""
        if self.quiet:
            return
        if sys.stdout.isatty() and sys.stderr.isatty():
            progress.console.print(text, markup=False, highlight=False)
        else:
            echo(text)


def _listed(measured: Mapping[str, float]) -> str:
    return ", ".join(f"validation {name} {number:.6g}" for name, number in measured.items())


def _why_diverged(arrays: Arrays, inputs: Mapping[str, np.ndarray]) -> str:
    """What of the data made a loss infinite or no number, for people; empty: they are finite."""
    import numpy as np

    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            finite = np.isfinite(arrays[name].reshape(len(arrays[name]), -1)).all(1)
            return f"sample {int(np.argmin(finite))} of {name!r} holds nan or inf"
    return ""


class DivergedError(ForeplanError):
    """A loss that is not a number."""

    exit_code = 1
