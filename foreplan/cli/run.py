"""Commands that run a model: run, bench, profile."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from foreplan.base.errors import UsageError
from foreplan.base.files import check_writable, write_atomically
from foreplan.base.units import format_bytes, format_seconds
from foreplan.cli.compiling import open_compiled
from foreplan.cli.data import max_rss_bytes, read_arrays, samples_in, write_arrays
from foreplan.cli.flags import (
    command,
    config_option,
    json_option,
    model_options,
    out_option,
    plan_file_options,
    settings_from,
    step_options,
)
from foreplan.cli.job import agree_on_options, facts_of, rank_of_job
from foreplan.cli.options import (
    deadline_option,
    echo,
    is_file,
    is_plan_file,
    print_json,
    say,
    seed_option,
    threads_option,
    with_threads,
    working,
)
from foreplan.cli.weights import load_weights, weights_options

if TYPE_CHECKING:
    import numpy as np

    from foreplan.cli.array_file import ArrayFile
    from foreplan.cli.data import Arrays
    from foreplan.compiler.compiled import Compiled
    from foreplan.runtime.session import Session


@command(short_help="Run the forward pass on a file of arrays.")
@click.argument("model")
@click.option("--data", required=True, metavar="X.npz", help="Arrays named like the inputs.")
@weights_options
@out_option("OUT.npz", "Where to write the outputs.")
@config_option
@step_options("batch", "shapes", "values", "target")
@plan_file_options
@threads_option
@seed_option
@deadline_option
@json_option
def run(
    model: str,
    data: str,
    weights: str | None,
    path: str | None,
    threads: int | None,
    seed: int,
    deadline: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the forward pass of MODEL on arrays from a file. MODEL may be an inference plan. Start a plan for several
    ranks with a launcher; the first rank writes the outputs.

    Without -o, prints the shape, lowest, mean and highest value of each output.

    \b
    Examples:
      foreplan run model.onnx --data x.npz -o outputs.npz
      foreplan run resnet50 --batch 8 --data images.npz --weights weights.safetensors
      mpirun -n 8 foreplan run llama.plan --data texts.npz -o outputs.npz
    """
    arrays = read_arrays(data)
    if path is not None:
        check_writable(path)
    options["target"], own = with_threads(options["target"], threads)
    settings = replace(settings_from(options), infer=True)
    open_shapes = settings.shapes is None and settings.batch is None and is_file(model)
    if open_shapes and not (is_plan_file(model) or model.endswith(".pt2")):
        settings = replace(settings, shapes=_shapes_from(model, arrays))
    compiled = open_compiled(model, settings)
    if compiled.program.loss is not None:
        raise UsageError(f"{model} is a plan for training; `run` wants one made with --infer")
    names = {slot.name for slot in compiled.program.inputs}
    if others := [name for name in arrays if name not in names]:
        say(f"note: the model does not take {', '.join(others)}")
        arrays = arrays.only(name for name in arrays if name in names)
    if compiled.program.ranks > 1:
        _agree(arrays, deadline)
    session = compiled.bind(seed=seed, threads=own)
    load_weights(session, weights, options)
    outputs = _infer(compiled, session, arrays, data)
    if compiled.program.ranks > 1 and rank_of_job() > 0:  # all ranks have the same
        return
    if path is not None:
        write_arrays(path, outputs)
    summary = {name: _summary(array) for name, array in outputs.items()}
    if as_json:
        print_json(summary)
    elif path is None:
        for name, s in summary.items():
            range_text = f"  min {s['min']:.6g}  mean {s['mean']:.6g}  max {s['max']:.6g}" if "min" in s else ""
            echo(f"{name}: {s['dtype']}{s['shape']}{range_text}")
    else:
        say(f"wrote {path}")


def _agree(arrays: ArrayFile, deadline: float | None) -> None:
    """Check that all ranks run one command on the same data."""
    from foreplan.runtime.ranks import current
    from foreplan.runtime.world.agreement import together

    world = current(deadline)
    agree_on_options(world, ("data", "weights"))
    with together(world, "the data") as facts:
        facts |= facts_of(arrays)
        list(arrays.values())  # which reads them


def _shapes_from(model: str, arrays: ArrayFile) -> dict[str, tuple[int, ...]] | None:
    """Shapes, as the data has them, of those inputs of an ONNX model whose shape the file leaves open."""
    from foreplan.frontend.onnx import declared_shapes

    shapes = {}
    for name, extents in declared_shapes(model).items():
        if name in arrays and (extents is None or None in extents):
            own = arrays.headers[name].shape
            if extents is not None and len(extents) == len(own):
                own = tuple(theirs if fixed is None else fixed for theirs, fixed in zip(own, extents))
            shapes[name] = own
    return shapes or None


def _summary(array: np.ndarray) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    if array.size:
        found |= {"min": float(array.min()), "mean": float(array.mean()), "max": float(array.max())}
    return found


def _infer(compiled: Compiled, session: Session, arrays: ArrayFile, path: str) -> Arrays:
    """Outputs for all samples: in one step where the shapes are the step's own, else batch by batch."""
    import numpy as np

    program = compiled.program
    shapes = {name: header.shape for name, header in arrays.headers.items()}
    if all(shapes.get(slot.name) == slot.operand.type.shape for slot in program.inputs):
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


@command(short_help="Time a step, and compare memory planned and used.")
@model_options
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=10,
    show_default=True,
    help="How many steps to run; the first is not timed.",
)
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
    from foreplan.runtime.inputs import made_up

    options["target"], own = with_threads(options["target"], threads)
    settings = settings_from(options)
    compiled = open_compiled(model, settings)
    before = max_rss_bytes()
    started = time.perf_counter()
    with working("binding"):
        session = compiled.bind(seed=seed, threads=own)
    bind_seconds = time.perf_counter() - started
    inputs = made_up(compiled.program, seed, compiled.accumulate)
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
        "planned_bytes": compiled.arena_bytes,
        "max_rss_bytes": max_rss_bytes(),
        "max_rss_before_bind_bytes": before,
        "bind_seconds": bind_seconds,
        "first_step_seconds": first,
    }
    if as_json:
        print_json(figures)
        return
    rate = figures["flops"] / figures["step_seconds_median"] / 1e9
    echo(
        f"{figures['model']}, {figures['mode']} on {figures['target']}\n"
        f"  step         {format_seconds(figures['step_seconds_median'])} median, {format_seconds(min(times))} best of "
        f"{steps - 1}; {format_seconds(cpu)} of CPU; {rate:,.1f} GFLOP/s\n"
        f"  first step   {format_seconds(first)}\n"
        f"  bind         {format_seconds(bind_seconds)}\n"
        f"  planned      {format_bytes(figures['planned_bytes'])}\n"
        f"  max resident {format_bytes(figures['max_rss_bytes'])}, of which {format_bytes(before)} before binding"
    )


TRACE = ".trace.json"


@command(short_help="Time a step instruction by instruction: by kernel and by module.")
@model_options
@click.option(
    "--steps",
    type=click.IntRange(1, 1_000),
    default=5,
    show_default=True,
    help="How many steps to time; the shortest time counts.",
)
@out_option(f"FILE{TRACE}", "Write the timeline, for Perfetto and Chrome.")
@threads_option
@seed_option
@json_option
def profile(
    model: str, steps: int, path: str | None, threads: int | None, seed: int, as_json: bool, **options: Any
) -> None:
    """Time a step of MODEL on made-up inputs, instruction by instruction, and say where the time goes.

    One table has a row per kernel, the other a row per module. Each row also shows the predicted time, and what share
    of this machine's best rate was reached.

    \b
    Examples:
      foreplan profile resnet50 --batch 8 --threads 1
      foreplan profile model.onnx --infer -o step.trace.json
    """
    from foreplan.runtime.inputs import made_up
    from foreplan.views.traces import trace_text

    if path is not None:
        if not path.endswith(TRACE):
            raise UsageError(f"the timeline is a trace for Perfetto and Chrome: name the file *{TRACE}, not {path!r}")
        check_writable(path)
    options["target"], own = with_threads(options["target"], threads)
    settings = settings_from(options)
    compiled = open_compiled(model, settings)
    if path is not None and compiled.update is not None:
        raise UsageError(
            "a timeline is of one plan, and a step with micro-batches has two: leave out -o or --accumulate"
        )
    with working("binding"):
        session = compiled.bind(seed=seed, threads=own)
    with working(f"{2 * steps + 1} steps"):
        found = session.profile(made_up(compiled.program, seed, compiled.accumulate), steps)
    if path is not None:
        nanoseconds = [round(1e9 * each.seconds) for each in found.instructions]
        write_atomically(path, trace_text(compiled.memory, compiled.program.model, nanoseconds))
    figures = compiled.estimate()
    if as_json:
        print_json({name: figures[name] for name in ("model", "mode", "target")} | found.to_json())
        return
    echo(f"{figures['model']}, {figures['mode']} on {figures['target']}\n{found}")
    for note in found.notes:
        say(f"note: {note}")
    if path is not None:
        say(f"wrote {path}")


COMMANDS = (run, bench, profile)
