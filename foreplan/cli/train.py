"""The command that trains a model: train."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from foreplan.cli.data import epoch, interruptible, read_arrays, samples_in
from foreplan.cli.options import (
    console,
    echo,
    given,
    json_option,
    model_options,
    open_compiled,
    print_json,
    seed_option,
    settings_from,
    threads_option,
    with_threads,
    working,
)
from foreplan.errors import ForeplanError, UsageError
from foreplan.files import check_writable
from foreplan.units import format_seconds

if TYPE_CHECKING:
    import numpy as np

    from foreplan.cli.data import Arrays
    from foreplan.compiled import Compiled
    from foreplan.runtime.session import Session

DIVERGED = "training has diverged; start from the last good checkpoint, or anew, with a lower --lr or with --clip-norm"


@dataclass
class Training:
    """How far a training run has come.

    Attributes:
        losses: of the steps of this run.
        seconds: of the same steps, each from when it was asked for to its result.
        signal: what stopped it, or 0.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    signal: int = 0

    def as_json(self) -> dict[str, Any]:
        """What `train --json` prints."""
        return {
            "steps": len(self.losses),
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "losses": self.losses,
            "step_seconds_median": statistics.median(self.seconds) if self.seconds else None,
            "interrupted": bool(self.signal),
        }


@dataclass
class Saving:
    """When and where a training run writes its checkpoint.

    Attributes:
        path: of the checkpoint; None: it is not written.
        every: steps from one writing to the next; None: it is written at the end alone.
        saved: the step after which it was last written by this run; None: it was not.
    """

    session: Session
    path: str | None
    every: int | None
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

        if self.path is None or self.saved == step:
            return
        for name, array in self.session.parameters.items():
            if np.isnan(array).any():
                raise DivergedError(f"parameter {name!r} holds nan after step {step}: {DIVERGED}. {self.state()}")
        self.session.save(self.path)
        self.saved = step

    def state(self) -> str:
        """What was written, for people."""
        return "No checkpoint was written" if self.saved is None else f"{self.path} holds step {self.saved}"


@click.command(short_help="Train a model on a file of arrays.")
@model_options
@click.option("--data", required=True, metavar="FILE.npz", help="Arrays named like the inputs; leading axis = samples.")
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data; 1 unless --steps is given.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after this number of steps.")
@click.option("-o", "--out", "path", metavar="W.safetensors", help="Checkpoint, written at the end and on Ctrl-C.")
@click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="Write the checkpoint every N steps, too.")
@click.option("--resume", metavar="W.safetensors", help="Go on from a checkpoint, exactly where it was.")
@click.option("--weights", metavar="W.safetensors", help="Start from these parameters, with a fresh optimizer.")
@threads_option
@seed_option
@json_option
def train(
    model: str,
    data: str,
    epochs: int | None,
    steps: int | None,
    path: str | None,
    save_every: int | None,
    resume: str | None,
    weights: str | None,
    threads: int | None,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Train MODEL on arrays from a file.

    Samples are shuffled anew each epoch, by the seed. A run that was stopped and resumed with the same options goes
    on exactly where it was. Ctrl-C finishes the step, writes the checkpoint and exits with 130. A checkpoint takes the
    place of the one before when it is whole; one with nan in a parameter is not written.

    \b
    Examples:
      foreplan train mlp:width=64,batch=16 --data digits.npz --epochs 5 --lr 0.1 -o weights.safetensors
      foreplan train model.onnx --data images.npz --optimizer adamw --lr 1e-3 -o w.safetensors --resume w.safetensors
      foreplan train model.onnx --data images.npz --batch 8 --accumulate 4 -o w.safetensors
    """
    options["target"], own = with_threads(options["target"], threads)
    settings = settings_from(options)
    if settings.infer:
        raise UsageError("`train` trains: leave --infer out")
    if resume is not None and weights is not None:
        raise UsageError("--resume and --weights both say where to start from: give one")
    if save_every is not None and path is None:
        raise UsageError("--save-every needs -o, where to write the checkpoint")
    arrays = read_arrays(data)
    if path is not None:
        check_writable(path)
    compiled = open_compiled(model, settings)
    if compiled.program.loss is None:
        raise UsageError(f"{model} is a plan for inference; `train` wants one made without --infer")
    samples, batch = samples_in(compiled.program, arrays, data)
    size = batch * compiled.accumulate
    if samples < size:
        advice = f"--batch {samples} or less" if compiled.accumulate == 1 else "a smaller --batch or --accumulate"
        raise UsageError(f"{data!r} has {samples} samples, and a step takes {size}: give {advice}")
    if not as_json:
        echo(compiled.weights.line)
    with working("binding"):
        session = compiled.bind(seed=seed, threads=own, weights=weights)
        if resume is not None:
            session.load(resume)
    per_epoch = samples // size
    last = steps if steps is not None else (epochs or 1) * per_epoch
    if steps is not None and epochs is not None:
        last = min(steps, epochs * per_epoch)
    first = session.steps_done if resume else 0
    if first >= last:
        raise UsageError(f"{resume!r} has {first} steps behind it, and {last} are asked for: raise --epochs or --steps")
    fixed: Arrays = {}
    if given("rate"):  # a plan has its own default
        import numpy as np

        fixed["learning_rate"] = np.asarray(settings.rate, np.float32)
    saving = Saving(session, path, save_every)
    training = _train(compiled, saving, arrays, fixed, (samples, size), (first, last), seed)
    _finish(training, saving, first, as_json)


def _train(
    compiled: Compiled,
    saving: Saving,
    arrays: Arrays,
    fixed: Arrays,
    sizes: tuple[int, int],
    steps: tuple[int, int],
    seed: int,
) -> Training:
    """Steps from the first to the one before the last, whatever epochs they lie in; stops after a signal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    (samples, size), (first, last) = sizes, steps
    per_epoch = samples // size
    training = Training()
    taken: deque[Mapping[str, np.ndarray]] = deque()  # by the step that runs, and by the next one

    def batches() -> Iterator[Arrays]:
        for number in range(first // per_epoch, math.ceil(last / per_epoch)):
            of_epoch = epoch(compiled.program, arrays, samples, size, seed, number, compiled.accumulate)
            for i, inputs in enumerate(of_epoch, number * per_epoch):
                if first <= i < last:
                    taken.append(inputs)
                    yield {**fixed, **inputs}

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with interruptible() as caught, Progress(*columns, console=console()) as progress:
        task = progress.add_task("", total=last, completed=first)
        started = time.perf_counter()
        for index, result in enumerate(saving.session.steps(batches()), first):
            loss, inputs = result.loss, taken.popleft()
            assert loss is not None
            training.seconds.append(time.perf_counter() - started)
            training.losses.append(loss)
            text = f"epoch {index // per_epoch + 1}  loss {loss:.4f}  {format_seconds(training.seconds[-1])} a step"
            progress.update(task, advance=1, description=text)
            if not math.isfinite(loss):
                why = _why_diverged(arrays, inputs)
                raise DivergedError(f"the loss is {loss} at step {index + 1}: {why}. {saving.state()}")
            saving.after(index + 1)
            if caught:
                training.signal = caught[0]
                return training
            started = time.perf_counter()
    return training


def _why_diverged(arrays: Arrays, inputs: Mapping[str, np.ndarray]) -> str:
    """What made a loss infinite or no number, for people: the data where they are not finite, else the training."""
    import numpy as np

    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            finite = np.isfinite(arrays[name].reshape(len(arrays[name]), -1)).all(1)
            return f"sample {int(np.argmin(finite))} of {name!r} holds nan or inf"
    return DIVERGED


class DivergedError(ForeplanError):
    """A loss that is not a number."""

    exit_code = 1


def _finish(training: Training, saving: Saving, first: int, as_json: bool) -> None:
    path = saving.path
    saving.save(first + len(training.losses))
    if as_json:
        print_json(training.as_json() | {"checkpoint": path})
    elif training.losses:
        echo(
            f"{len(training.losses)} steps: loss {training.losses[0]:.6g} -> {training.losses[-1]:.6g}, "
            f"{format_seconds(statistics.median(training.seconds))} a step" + (f"; wrote {path}" if path else "")
        )
    if training.signal:
        last = saving.session.steps_done
        done = f"step {last} is in {path}: go on with --resume {path}" if path else "nothing was saved"
        echo(f"interrupted; {done}", err=True)
        click.get_current_context().exit(128 + training.signal)


COMMANDS = (train,)
