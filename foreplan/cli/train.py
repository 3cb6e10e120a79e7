"""The command that trains a model: train."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import click

from foreplan.base.errors import UsageError
from foreplan.base.files import check_writable
from foreplan.base.units import format_seconds
from foreplan.cli.compiling import open_compiled
from foreplan.cli.flags import command, given, json_option, model_options, out_option, settings_from
from foreplan.cli.job import agree_on_options, check_ranks, read_alike, samples_alike, share_of, with_ranks
from foreplan.cli.log import open_logs
from foreplan.cli.optimizer import with_steps
from foreplan.cli.options import deadline_option, echo, print_json, seed_option, threads_option, with_threads, working
from foreplan.cli.stages import samples_of_stages
from foreplan.cli.training import Run, Saving, Training
from foreplan.cli.validation import Validation, validation_of
from foreplan.cli.weights import load_weights, weights_options

if TYPE_CHECKING:
    import numpy as np

    from foreplan.runtime.ranks import World
    from foreplan.runtime.session import Session

FILES = ("data", "validation", "resume", "weights")  # parameters whose content ranks compare


@command(short_help="Train a model on a file of arrays.")
@model_options
@click.option(
    "--data", required=True, metavar="FILE.npz", help="Arrays named like the inputs. The leading axis is samples."
)
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data; 1 unless --steps is given.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after this number of steps.")
@out_option("W.safetensors", "Write the checkpoint there, at the end and on Ctrl-C.")
@click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="Write the checkpoint every N steps, too.")
@click.option("--validation", metavar="FILE.npz", help="Measure the model on this data after each epoch.")
@click.option(
    "--metrics",
    multiple=True,
    metavar="NAME",
    help="What to measure: one of fp.metrics, or a loss; may be given again.",
)
@click.option("--log", metavar="FILE.csv", help="Write the figures of each step there.")
@click.option("--tensorboard", metavar="DIR", help="Write the figures of each step for TensorBoard, too.")
@click.option("--save-averages", "averages", metavar="FILE", help="Write the model with averaged weights there.")
@click.option(
    "--save-adapters", "adapters", metavar="FOLDER", help="Write the adapters of --lora there, in PEFT's format."
)
@click.option("--resume", metavar="W.safetensors", help="Continue from a checkpoint, exactly where it stopped.")
@weights_options
@threads_option
@seed_option
@deadline_option
@json_option
def train(
    model: str,
    data: str,
    epochs: int | None,
    steps: int | None,
    path: str | None,
    save_every: int | None,
    validation: str | None,
    metrics: tuple[str, ...],
    log: str | None,
    tensorboard: str | None,
    averages: str | None,
    adapters: str | None,
    resume: str | None,
    weights: str | None,
    threads: int | None,
    seed: int,
    deadline: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train MODEL on arrays from a file.

    The seed decides how samples are shuffled in each epoch. If a launcher starts several ranks, each takes its share of
    a step's samples. A stopped run goes on exactly where it was with --resume and the same options. Ctrl-C finishes the
    step, writes the checkpoint and exits with 130. A new checkpoint replaces the old one only when it is complete; one
    with nan in a parameter is not written.

    \b
    Examples:
      mpirun -n 4 foreplan train model.onnx --data images.npz --shard state -o w.safetensors
      foreplan train mlp:width=64,batch=16 --data digits.npz --epochs 5 --lr 0.1 -o weights.safetensors
      foreplan train model.onnx --data images.npz --optimizer adamw --lr 1e-3 -o w.safetensors --resume w.safetensors
      foreplan train model.onnx --data images.npz --batch 8 --accumulate 4 -o w.safetensors
      foreplan train mlp --data digits.npz --optimizer lion --lr 1e-3 --schedule cosine:warmup=20 --steps 500
      foreplan train model.onnx --data texts.npz --lora "*.q_proj" --lora "*.v_proj" --save-adapters adapters
      foreplan train model.onnx --data a.npz --validation b.npz --metrics accuracy --log run.csv -o w.safetensors
    """
    from foreplan.runtime.ranks import current

    world = current(deadline)
    agree_on_options(world, FILES)
    options["target"], own = with_threads(options["target"], threads)
    options["schedule"] = with_steps(options["schedule"], steps)
    settings = with_ranks(model, settings_from(options), world)
    if settings.infer:
        raise UsageError("`train` trains: leave --infer out")
    if resume is not None and weights is not None:
        raise UsageError("--resume and --weights both say where to start from: give one")
    if metrics and validation is None:
        raise UsageError("--metrics are measured on the data of --validation: give it too")
    if save_every is not None and not any((path, adapters, averages)):
        raise UsageError("--save-every needs -o, where to write the checkpoint")
    arrays = read_alike(data, world)
    for each in (path, averages):
        if each is not None:
            check_writable(each)
    compiled = open_compiled(model, settings)
    if compiled.program.loss is None:
        raise UsageError(f"{model} is a plan for inference; `train` wants one made without --infer")
    check_ranks(model, compiled, world)
    if adapters is not None:
        from foreplan.runtime.adapters import prepare

        prepare(adapters, compiled.program, world)
    micro_batches = compiled.accumulate
    if compiled.program.is_stage:
        micro_batches = int(settings.step.accumulate)
        samples, batch, arrays = samples_of_stages(compiled.program, arrays, data, micro_batches, world)
    else:
        samples, batch = samples_alike(compiled.program, arrays, data, world)
    share = share_of(compiled.program, world)
    size = batch * micro_batches * share.shares
    if samples < size:
        takes = _takes(batch, micro_batches, share.shares, world, samples)
        raise UsageError(f"{data!r} has {samples} samples, and a step {takes}")
    quiet = as_json or world.rank > 0
    if not quiet:
        echo(compiled.weights.line)

    def bound() -> Session:
        made = compiled.bind(seed=seed, threads=own)
        load_weights(made, weights, dict(options))
        if resume is not None:
            made.load(resume)
        return made

    with working("binding"):
        session = bound()
    if averages is not None and not session.keeps_averages:
        raise UsageError("--save-averages needs an optimizer that keeps averages, such as --optimizer adamw:ema=0.999")
    per_epoch = samples // size
    last = steps if steps is not None else (epochs or 1) * per_epoch
    if steps is not None and epochs is not None:
        last = min(steps, epochs * per_epoch)
    first = session.steps_done if resume else 0
    if first >= last:
        raise UsageError(f"{resume!r} has {first} steps behind it, and {last} are asked for: raise --epochs or --steps")
    fixed: dict[str, np.ndarray] = {}
    if given("rate") and settings.schedule is None:  # a plan has its own default
        from foreplan.runtime.inputs import check_array

        last_half = compiled.program if compiled.update is None else compiled.update.program
        rate = next((slot for slot in last_half.inputs if slot.is_rate), None)
        if rate is None:
            raise UsageError(f"{model!r} computes its learning rate by a schedule: leave --lr out")
        fixed[rate.name] = check_array(rate, settings.rate)
    measured = None
    if validation is not None:
        with working("compiling the validation"):
            measured = validation_of(model, settings, session, validation, metrics, world, share)
    if not quiet:
        _say_what_is_left_out(samples, size, measured)
    saving = Saving(session, path, save_every, adapters, averages)
    columns = ["step", "epoch", "loss", "seconds"]
    columns += [f"validation_{name}" for name in (measured.names if measured else ())]
    if world.rank > 0:
        log = tensorboard = None
    with open_logs(log, tensorboard, columns, first) as logs:
        run = Run(
            compiled,
            saving,
            arrays,
            samples,
            size,
            micro_batches,
            first,
            last,
            seed,
            world,
            share,
            fixed,
            measured,
            logs,
            quiet=quiet,
            anew=bound,
        )
        training = run.train()
        _finish(training, saving, first, as_json, world)


def _say_what_is_left_out(samples: int, size: int, validation: Validation | None) -> None:
    """Notes on samples that fill no step."""
    if rest := samples % size:
        echo(f"note: {rest} of {samples} samples fill no step; each epoch leaves out others", err=True)
    if validation is not None and validation.left_out:
        echo(
            f"note: {validation.left_out} samples of the validation fill no step, and the model's batch is fixed: they "
            "are left out",
            err=True,
        )


def _takes(batch: int, micro_batches: int, shares: int, world: World, samples: int) -> str:
    """How many samples a step takes, and what to do where these are too many, for people."""
    alike = world.size // shares
    whom = "ranks" if alike == 1 else f"groups of {alike} ranks"
    size = batch * micro_batches * shares
    of_ranks = f" ({size // shares} on each of {shares} {whom})" if shares > 1 else ""
    if samples < shares:
        return f"takes {size}{of_ranks}: there are more {whom} than samples; start {samples} or fewer"
    least = samples // shares
    advice = f"--batch {least} or less" if micro_batches == 1 else "a smaller --batch or --accumulate"
    return f"takes {size}{of_ranks}: give {advice}"


def _finish(training: Training, saving: Saving, first: int, as_json: bool, world: World) -> None:
    path, written = saving.path, saving.written
    saving.save(first + len(training.losses))
    if world.rank > 0:
        pass
    elif as_json:
        print_json(training.as_json() | {"checkpoint": path, "adapters": saving.adapters, "averages": saving.averages})
    elif training.losses:
        echo(
            f"{len(training.losses)} steps: loss {training.losses[0]:.6g} -> {training.losses[-1]:.6g}, "
            f"{format_seconds(statistics.median(training.seconds))} a step" + (f"; wrote {written}" if written else "")
        )
    if training.signal:
        last = saving.session.steps_done
        done = f"step {last} is in {written}" if written else "nothing was saved"
        done += f": go on with --resume {path}" if path else ""
        if world.rank == 0:
            echo(f"interrupted; {done}", err=True)
        click.get_current_context().exit(128 + training.signal)


COMMANDS = (train,)
