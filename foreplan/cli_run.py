"""Commands that run a model: run, train, bench."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from foreplan.cli_data import epoch, interruptible, made_up, max_rss_bytes, read_arrays, samples_in, write_arrays
from foreplan.cli_options import (
    console,
    given,
    is_file,
    is_plan_file,
    json_option,
    model_options,
    open_compiled,
    parse_shapes,
    print_json,
    say,
    settings_from,
    working,
)
from foreplan.errors import ForeplanError, UsageError
from foreplan.files import check_writable
from foreplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import numpy as np

    from foreplan.api import Compiled
    from foreplan.cli_data import Arrays
    from foreplan.runtime.session import Session

threads_option = click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads of the BLAS library.")
seed_option = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)


@click.command(short_help="Run the forward pass on a file of arrays.")
@click.argument("model")
@click.option("--data", required=True, metavar="X.npz", help="Arrays named like the inputs.")
@click.option("--weights", metavar="W.safetensors", help="Parameters, from `train` or another tool.")
@click.option("-o", "--out", "path", metavar="OUT.npz", help="Where to write the outputs.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Samples a step; all at once by default.")
@click.option("--shapes", multiple=True, metavar="X:32x3x224x224", help="Shape of an input; may be given again.")
@click.option("--target", default="numpy", show_default=True, help="The engine to run on.")
@threads_option
@seed_option
@json_option
def run(
    model: str,
    data: str,
    weights: str | None,
    path: str | None,
    batch: int | None,
    shapes: tuple[str, ...],
    target: str,
    threads: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Run the forward pass of MODEL on arrays from a file. MODEL may be an inference plan.

    Without -o, prints what came out: shape, lowest, mean and highest of each output.

    \b
    Examples:
      foreplan run model.onnx --data x.npz -o outputs.npz
      foreplan run resnet50 --batch 8 --data images.npz --weights weights.safetensors
    """
    from foreplan.cli_options import Settings

    arrays = read_arrays(data)
    if path is not None:
        check_writable(path)
    shaped = parse_shapes(shapes)
    if shaped is None and batch is None and is_file(model) and not is_plan_file(model):
        shaped = _shapes_from(model, arrays)
    compiled = open_compiled(model, Settings(batch=batch, shapes=shaped, train=False, target=target))
    if compiled.program.loss is not None:
        raise UsageError(f"{model} is a plan for training; `run` wants one made with --infer")
    names = {slot.name for slot in compiled.program.inputs}
    if others := [name for name in arrays if name not in names]:
        say(f"note: the model does not take {', '.join(others)}")
        arrays = {name: array for name, array in arrays.items() if name in names}
    session = compiled.bind(seed=seed, threads=threads, weights=weights)
    outputs = _infer(compiled, session, arrays, data)
    if path is not None:
        write_arrays(path, outputs)
    summary = {name: _summary(array) for name, array in outputs.items()}
    if as_json:
        print_json(summary)
    elif path is None:
        for name, s in summary.items():
            range_text = f"  min {s['min']:.6g}  mean {s['mean']:.6g}  max {s['max']:.6g}" if "min" in s else ""
            click.echo(f"{name}: {s['dtype']}{s['shape']}{range_text}")
    else:
        say(f"wrote {path}")


def _shapes_from(model: str, arrays: Arrays) -> dict[str, tuple[int, ...]] | None:
    """Shapes, as the data has them, of those inputs of an ONNX model whose shape the file leaves open."""
    from foreplan.frontend.onnx import declared_shapes

    shapes = {}
    for name, extents in declared_shapes(model).items():
        if name in arrays and (extents is None or None in extents):
            own = arrays[name].shape
            if extents is not None and len(extents) == len(own):
                own = tuple(theirs if fixed is None else fixed for theirs, fixed in zip(own, extents))
            shapes[name] = own
    return shapes or None


def _summary(array: np.ndarray) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    if array.size:
        found |= {"min": float(array.min()), "mean": float(array.mean()), "max": float(array.max())}
    return found


def _infer(compiled: Compiled, session: Session, arrays: Arrays, path: str) -> Arrays:
    """Outputs for all samples: in one step where the shapes are the step's own, else batch by batch."""
    import numpy as np

    program = compiled.program
    if all(slot.name in arrays and arrays[slot.name].shape == slot.operand.type.shape for slot in program.inputs):
        return session.step(arrays).outputs
    samples, batch = samples_in(program, arrays, path)
    per_sample = all(slot.operand.type.shape[:1] == (batch,) for slot in program.outputs)
    if not per_sample:
        raise UsageError(
            f"{path!r} has {samples} samples and a step takes {batch}, but not every output has an axis of samples: "
            f"compile for all samples with --batch {samples}, or give {batch}"
        )
    pieces: dict[str, list[np.ndarray]] = {slot.name: [] for slot in program.outputs}
    for start in range(0, samples, batch):
        end = min(start + batch, samples)
        # The last batch is filled up with copies of its last sample, whose outputs are dropped.
        chosen = np.minimum(np.arange(start, start + batch), end - 1)
        given = {slot.name: arrays[slot.name][chosen] for slot in program.inputs if slot.name in arrays}
        for name, array in session.step(given).outputs.items():
            pieces[name].append(array[: end - start])
    return {name: np.concatenate(parts) for name, parts in pieces.items()}


@dataclass
class Training:
    """How far a training run has come.

    Attributes:
        losses: of the steps of this run.
        seconds: of the same steps.
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


@click.command(short_help="Train a model on a file of arrays.")
@model_options
@click.option("--data", required=True, metavar="FILE.npz", help="Arrays named like the inputs; leading axis = samples.")
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data; 1 unless --steps is given.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after so many steps.")
@click.option("-o", "--out", "path", metavar="W.safetensors", help="Checkpoint, written at the end and on Ctrl-C.")
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
    resume: str | None,
    weights: str | None,
    threads: int | None,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Train MODEL on arrays from a file.

    Samples are shuffled anew each epoch, by the seed. A run that was stopped and resumed with the same options goes
    on exactly where it was. Ctrl-C finishes the step, writes the checkpoint and exits with 130.

    \b
    Examples:
      foreplan train mlp:width=64,batch=16 --data digits.npz --epochs 5 --lr 0.1 -o weights.safetensors
      foreplan train model.onnx --data images.npz --optimizer adamw --lr 1e-3 -o w.safetensors --resume w.safetensors
    """
    settings = settings_from(options)
    if not settings.train:
        raise UsageError("`train` trains: leave --infer out")
    if resume is not None and weights is not None:
        raise UsageError("--resume and --weights both say where to start from: give one")
    arrays = read_arrays(data)
    if path is not None:
        check_writable(path)
    compiled = open_compiled(model, settings)
    if compiled.program.loss is None:
        raise UsageError(f"{model} is a plan for inference; `train` wants one made without --infer")
    samples, batch = samples_in(compiled.program, arrays, data)
    if samples < batch:
        raise UsageError(f"{data!r} has {samples} samples, and a step takes {batch}: give --batch {samples} or less")
    with working("binding"):
        session = compiled.bind(seed=seed, threads=threads, weights=weights)
        if resume is not None:
            session.load(resume)
    per_epoch = samples // batch
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
    training = _train(compiled, session, arrays, fixed, (samples, batch), (first, last), seed)
    _finish(training, session, path, as_json)


def _train(
    compiled: Compiled,
    session: Session,
    arrays: Arrays,
    fixed: Arrays,
    sizes: tuple[int, int],
    steps: tuple[int, int],
    seed: int,
) -> Training:
    """Steps from the first to the one before the last, whatever epochs they lie in; stops after a signal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    (samples, batch), (first, last) = sizes, steps
    per_epoch = samples // batch
    training = Training()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with interruptible() as caught, Progress(*columns, console=console()) as progress:
        task = progress.add_task("", total=last, completed=first)
        for number in range(first // per_epoch, math.ceil(last / per_epoch)):
            for i, inputs in enumerate(epoch(compiled.program, arrays, samples, batch, seed, number)):
                index = number * per_epoch + i
                if not first <= index < last:
                    continue
                started = time.perf_counter()
                loss = session.step({**fixed, **inputs}).loss
                assert loss is not None
                training.seconds.append(time.perf_counter() - started)
                training.losses.append(loss)
                text = f"epoch {number + 1}  loss {loss:.4f}  {format_seconds(training.seconds[-1])} a step"
                progress.update(task, advance=1, description=text)
                if not math.isfinite(loss):
                    raise DivergedError(f"the loss is {loss} at step {index + 1}: {_why_diverged(arrays, inputs)}")
                if caught:
                    training.signal = caught[0]
                    return training
    return training


def _why_diverged(arrays: Arrays, inputs: Mapping[str, np.ndarray]) -> str:
    """What made a loss infinite or no number, for people: the data where they are not finite, else the training."""
    import numpy as np

    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            finite = np.isfinite(arrays[name].reshape(len(arrays[name]), -1)).all(1)
            return f"sample {int(np.argmin(finite))} of {name!r} holds nan or inf. No checkpoint was written"
    return "training has diverged. No checkpoint was written; start from the last good one, or anew, with a lower --lr"


class DivergedError(ForeplanError):
    """A loss that is not a number."""

    exit_code = 1


def _finish(training: Training, session: Session, path: str | None, as_json: bool) -> None:
    if path is not None:
        session.save(path)
    if as_json:
        print_json(training.as_json() | {"checkpoint": path})
    elif training.losses:
        click.echo(
            f"{len(training.losses)} steps: loss {training.losses[0]:.6g} -> {training.losses[-1]:.6g}, "
            f"{format_seconds(statistics.median(training.seconds))} a step" + (f"; wrote {path}" if path else "")
        )
    if training.signal:
        done = f"step {session.steps_done} is in {path}: go on with --resume {path}" if path else "nothing was saved"
        click.echo(f"interrupted; {done}", err=True)
        click.get_current_context().exit(128 + training.signal)


@click.command(short_help="Time a step, and compare memory planned and used.")
@model_options
@click.option("--steps", type=click.IntRange(min=2), default=10, show_default=True, help="The first is not timed.")
@threads_option
@seed_option
@json_option
def bench(model: str, steps: int, threads: int | None, seed: int, as_json: bool, **options: Any) -> None:
    """Time a step of MODEL on made-up inputs, and compare the memory planned with the memory used.

    \b
    Examples:
      foreplan bench resnet50 --batch 8 --steps 5 --threads 4
      foreplan bench model.onnx --batch 1 --infer --json
    """
    settings = settings_from(options)
    compiled = open_compiled(model, settings)
    before = max_rss_bytes()
    started = time.perf_counter()
    with working("binding"):
        session = compiled.bind(seed=seed, threads=threads)
    bind_seconds = time.perf_counter() - started
    inputs = made_up(compiled.program, seed)
    with working("first step"):
        started = time.perf_counter()
        session.step(inputs)
        first = time.perf_counter() - started
    times, cpu = [], time.process_time()
    with working(f"{steps - 1} timed steps"):
        for _ in range(steps - 1):
            started = time.perf_counter()
            session.step(inputs)
            times.append(time.perf_counter() - started)
    cpu = (time.process_time() - cpu) / (steps - 1)
    figures = compiled.estimate() | {
        "steps": steps,
        "threads": threads,
        "step_seconds_median": statistics.median(times),
        "step_seconds_min": min(times),
        "step_cpu_seconds": cpu,
        "planned_bytes": compiled.plan.arena_bytes,
        "max_rss_bytes": max_rss_bytes(),
        "max_rss_before_bind_bytes": before,
        "bind_seconds": bind_seconds,
        "first_step_seconds": first,
    }
    if as_json:
        print_json(figures)
        return
    rate = figures["flops"] / figures["step_seconds_median"] / 1e9
    click.echo(
        f"{figures['model']}, {figures['mode']} on {figures['target']}\n"
        f"  step         {format_seconds(figures['step_seconds_median'])} median, {format_seconds(min(times))} best of "
        f"{steps - 1}; {format_seconds(cpu)} of CPU; {rate:,.1f} GFLOP/s\n"
        f"  first step   {format_seconds(first)}\n"
        f"  bind         {format_seconds(bind_seconds)}\n"
        f"  planned      {format_bytes(figures['planned_bytes'])}\n"
        f"  max resident {format_bytes(figures['max_rss_bytes'])}, of which {format_bytes(before)} before binding"
    )


COMMANDS = (run, train, bench)
