"""Commands about plans: estimate, plan, verify, view, diff, place, models."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from foreplan.base.errors import DoesNotFitError, PlanError, UsageError
from foreplan.base.files import check_writable
from foreplan.base.units import format_bytes, format_count, format_seconds, parse_bytes
from foreplan.cli.compiling import compile_at, compile_model, open_compiled, without_plan_file
from foreplan.cli.factory import is_factory, made
from foreplan.cli.flags import (
    command,
    config_option,
    given,
    json_option,
    model_options,
    out_option,
    plan_file_options,
    settings_from,
    step_options,
)
from foreplan.cli.options import echo, is_plan_file, print_json, say, working

if TYPE_CHECKING:
    from foreplan.cli.settings import Settings
    from foreplan.compiler.compiled import Compiled
    from foreplan.fit.remedies import Remedy
    from foreplan.report.beside import Beside
    from foreplan.report.verdict import Verdict

_WORK_PER_SECOND = 400_000_000  # of the systematic search for offsets, on a usual machine


@command(short_help="Say how much memory a step takes.")
@model_options
@click.option("--parameters", "listed", is_flag=True, help="List what is trained and what is frozen, and why.")
@click.option(
    "--as",
    "framework",
    metavar="pytorch|ddp[:KEY=VALUE]",
    help="Compare the plan with the same step in eager PyTorch, phase by phase; ddp: in DistributedDataParallel. "
    "Options such as zero=keep describe the training loop. On a card, cuDNN tells how much workspace convolutions "
    "take; workspace=SIZE limits it.",
)
@click.option(
    "--snapshot",
    metavar="EAGER.pickle",
    help="With --as: write PyTorch's step as a snapshot for pytorch.org/memory_viz.",
)
@json_option
def estimate(
    model: str, listed: bool, framework: str | None, snapshot: str | None, as_json: bool, **options: Any
) -> None:
    """Say how much memory a step of MODEL takes, and what fills the peak. Allocates nothing and reads no weights.

    MODEL may be a plan file too. For a card, the last line says whether the step fits. If it does not, the command
    lists what would fit, such as a smaller batch, a budget or a narrower precision, and exits with 3.

    \b
    Examples:
      foreplan estimate resnet50 --batch 32
      foreplan estimate resnet50 --batch 512 --target cuda:t4
      foreplan estimate model.onnx --shapes x:32x3x224x224 --optimizer adamw --budget 2GiB
      foreplan estimate resnet50 --batch 8 --accumulate 4
      foreplan estimate model.onnx --freeze '*' --train head --parameters
      foreplan estimate gpt2_small --infer --json
      foreplan estimate gpt2_small --ranks 4 --stages 4 --accumulate 16 --target cuda:h100
      foreplan estimate resnet50 --as pytorch:zero=keep
      foreplan estimate resnet50 --as pytorch:workspace=64MiB --target cuda:t4
    """
    variant = None
    if framework is not None:
        from foreplan.eager import variant_options

        variant = variant_options(framework)
    elif snapshot is not None:
        raise UsageError(
            "--snapshot writes the step of --as: say --as pytorch (a plan's: foreplan view -o plan.pickle)"
        )
    settings = settings_from(options)
    if settings.step.stages > 1 and not is_plan_file(model) and not given("stage"):
        if listed or framework is not None:
            raise UsageError("--parameters and --as are for a step that one rank runs whole: leave --stages out")
        from foreplan.cli.stages import estimate_stages

        if not estimate_stages(model, settings, as_json):
            raise click.exceptions.Exit(DoesNotFitError.exit_code)
        return
    compiled = open_compiled(model, settings)
    figures, weights, verdict = compiled.estimate(), compiled.weights, compiled.verdict
    found = [] if verdict.fits is not False else _remedies(model, settings, compiled)
    beside = None if variant is None else _beside(model, settings, compiled, variant)
    if beside is not None and snapshot is not None:
        from foreplan.base.files import write_atomically
        from foreplan.views.snapshot import eager_snapshot, snapshot_bytes

        write_atomically(snapshot, snapshot_bytes(eager_snapshot(beside.eager)))
    if as_json:
        figures |= {} if beside is None else {"pytorch": beside.as_json()}
        rows = {"parameters": [asdict(row) | {"type": str(row.type)} for row in weights.rows]} if listed else {}
        print_json(figures | {"remedies": [remedy.to_json() for remedy in found]} | rows)
        _exit(verdict)
        return
    echo(_headline(figures))
    if figures["ranks"] > 1:
        echo(_exchanges(figures))
    if compiled.program.loss is not None:
        echo(weights.line)
    echo()
    if listed:
        echo(str(weights))
    echo(str(compiled.memory if beside is None else beside), nl=False)
    for note in figures["notes"]:
        say(f"note: {note}")
    if verdict.fits is not None:
        echo(f"\n{verdict.lacking}." if verdict.lacking else "")
        echo(f"{verdict}{'. Fits: ' * bool(found)}{'; or '.join(map(str, found))}")
    _exit(verdict)


def _beside(model: str, settings: Settings, compiled: Compiled, variant: dict[str, Any]) -> Beside:
    """PyTorch's step beside the plan. PyTorch runs the module of a user's function; of any other MODEL the graph is
    counted.
    """
    given = made(model, settings.batch) if is_factory(model) else None
    shard = variant.pop("shard", None)
    if given is None or not hasattr(given.model, "named_modules"):  # a program or a graph
        if shard is not None:
            raise UsageError("--as fsdp2 runs a PyTorch module itself: give package.module:make as MODEL")
        return compiled.as_pytorch(**variant)
    if shard == ():
        from foreplan.eager.watched.ranks import members_of_lists

        shard = members_of_lists(given.model)
    if settings.shapes or (settings.batch is not None and not given.takes_batch):
        raise UsageError(
            f"--as pytorch runs the module on the example of {model!r}: let its function take batch=, and leave "
            "--shapes out"
        )
    from foreplan.cli.model import loss_by_default
    from foreplan.eager.at_hand import eager_memory
    from foreplan.views.eager_comparison import Beside

    options = compiled.options
    default = "cross_entropy" if compiled.model is None else loss_by_default(compiled.model)
    eager = eager_memory(
        given.model,
        *given.args,
        kwargs=given.kwargs,
        loss=options.loss or settings.loss or default,
        optimizer=options.optimizer,
        precision=options.precision,
        accumulate=compiled.accumulate,
        target=compiled.program.target,
        ranks=options.ranks,
        shard=shard or (),
        variant=variant,
    )
    return Beside(eager, compiled.program, compiled.plan)


def _remedies(model: str, settings: Settings, compiled: Compiled) -> list[Remedy]:
    """What makes a step of a model fit its card; nothing for a plan file."""
    from foreplan.fit.fitting import batch_of
    from foreplan.fit.remedies import remedies

    if compiled.model is None:
        return []
    say(f"{compiled.verdict}; looking for what fits")
    again = partial(compile_at, model, settings)
    return list(remedies(compiled, batch_of(compiled.model), again))


def _exit(verdict: Verdict) -> None:
    """Exit with 3 if a step does not fit its card."""
    if verdict.fits is False:
        raise click.exceptions.Exit(DoesNotFitError.exit_code)


def _headline(figures: dict[str, Any]) -> str:
    extra = figures["extra_flops_ratio"]
    recomputed = f", {extra:.2%} of it recomputed" if extra else ""
    host = f", {format_bytes(figures['host_bytes'])} of host memory" if figures["host_bytes"] else ""
    copied = f"{host} ({figures['extra_seconds_ratio']:+.2%} predicted time in all)" if host else ""
    parts = f", {figures['accumulate']} micro-batches" if figures["accumulate"] > 1 else ""
    once = figures["compile_seconds"]
    after = f", after {format_seconds(once)} for compiling the planner, once on this machine" if once else ""
    planned = f"; planned in {format_seconds(figures['plan_seconds'])}{after}" if figures["plan_seconds"] else ""
    return (
        f"{figures['model']}, {figures['mode']} on {figures['target']}{parts}: {figures['nodes']:,} nodes, "
        f"{figures['instructions']:,} instructions, {format_count(figures['flops'], 'FLOP')}"
        f"{recomputed}{copied}{planned}"
    )


def _exchanges(figures: dict[str, Any]) -> str:
    """What a rank sends, and how long that takes."""
    took, step = (format_seconds(figures[name]) for name in ("exchange_seconds", "predicted_seconds"))
    groups = f" in groups of {figures['tensor']}" if figures["tensor"] > 1 else ""
    return (
        f"one of {figures['ranks']:,} ranks{groups}; in a step each sends {format_bytes(figures['sent_bytes'])} in "
        f"{figures['exchanges']:,} exchanges, predicted {took} of {step}, partly beside computing"
    )


@command(short_help="Write the plan of a step to a file.")
@model_options
@out_option("FILE", "Where to write the plan.", required=True)
@click.option("--kernels", is_flag=True, help="Also store the kernels that were compiled for a card.")
@json_option
def plan(model: str, path: str, kernels: bool, as_json: bool, **options: Any) -> None:
    """Plan a step of MODEL and write the plan to a file, which `verify`, `view`, `diff` and `run` read.

    \b
    Examples:
      foreplan plan resnet50 --batch 32 -o resnet50.plan
      foreplan plan model.onnx --batch 8 --budget 1GiB -o model.plan
      foreplan plan resnet50 --target cuda:h100 --kernels -o resnet50.plan
    """
    if is_plan_file(model):
        raise UsageError(f"{model!r} is a plan already: give a model, or look at the plan with `foreplan view {model}`")
    check_writable(path)
    compiled = compile_model(model, settings_from(options))
    compiled.save(path, kernels=kernels)
    figures = compiled.estimate()
    if as_json:
        print_json(figures | {"file": path})
    else:
        echo(f"{path}: {_headline(figures)}; arena {format_bytes(figures['arena_bytes'])}")


@command(short_help="Check a plan file.")
@click.argument("file")
@plan_file_options
@json_option
def verify(file: str, trust_code: bool, weights_folder: str | None, as_json: bool) -> None:
    """Check a plan file: replay it over abstract memory and prove that every read sees its value.

    Exits with 1 if the plan is damaged or refused.

    \b
    Example:
      foreplan verify resnet50.plan
    """
    from foreplan.compiler.compiled import load_plan

    try:
        compiled = load_plan(file, trust_code=trust_code, weights_folder=weights_folder)
    except PlanError as error:
        if as_json:
            print_json({"file": file, "verified": False, "reason": str(error), "exit_code": error.exit_code})
        raise
    figures = compiled.estimate()
    if as_json:
        print_json({"file": file, "verified": True} | figures)
    else:
        echo(
            f"{file}: verified; {figures['model']} on {figures['target']}, {figures['instructions']:,} instructions, "
            f"arena {format_bytes(figures['arena_bytes'])}"
        )


@command(short_help="Show where the bytes are, as a table, a map, or a file for other tools.")
@model_options
@out_option("FILE", "Write a file instead, in the format that its name says.")
@click.option("--format", "form", metavar="NAME", help="The format, if the name does not say it: html, svg, …")
@click.option("--over", metavar="OTHER.plan", help="Draw the plan of another file over this one, on the map.")
@json_option
def view(model: str, path: str | None, form: str | None, over: str | None, as_json: bool, **options: Any) -> None:
    """Show where the bytes are. MODEL may be a plan file too.

    Without -o, prints the memory as a table. With it, the ending of the name says what is written:

    \b
      .html             the memory map: one page, opens offline
      .svg              the map as a picture
      .csv              one row per buffer
      .trace.json       a trace over predicted time, for Perfetto and Chrome
      .speedscope.json  time and bytes by module, for speedscope
      .onnx             instructions with offsets and lifetimes, for Netron
      .graphml          a graph of instructions and contents (needs networkx)
      .dot              a graph of instructions, for Graphviz
      .pickle           allocations, for PyTorch's memory_viz page

    \b
    Examples:
      foreplan view resnet50 --batch 32 -o map.html
      foreplan view resnet50.plan
      foreplan view lean.plan --over resnet50.plan -o map.html
      foreplan view resnet50.plan -o resnet50.trace.json
      foreplan view resnet50.plan -o /dev/stdout --format csv
    """
    if path is not None:
        from foreplan.views.formats import format_of

        format_of(path, form)
        check_writable(path)
    elif over is not None or form is not None:
        raise UsageError("--over and --format are for a file: say where to write it with -o FILE")
    settings = settings_from(options)
    compiled = open_compiled(model, settings)
    if path is not None:
        compiled.view(path, over=None if over is None else _plan_file(over, settings), format=form)
    if as_json:
        print_json(compiled.memory.as_json())
    elif path is None:
        echo(str(compiled.memory), nl=False)
    else:
        say(f"wrote {path}")


def _plan_file(path: str, settings: Settings) -> Compiled:
    """The compiled step of the plan file that --over names."""
    from foreplan.compiler.compiled import load_plan

    if not is_plan_file(path):
        raise UsageError(
            f"--over takes a plan file, and {path!r} is none: write one with `foreplan plan MODEL -o FILE`"
        )
    return load_plan(path, trust_code=settings.trust_code, weights_folder=settings.weights_folder)


@command(short_help="Say what changed between two plans.")
@click.argument("before")
@click.argument("after")
@config_option
@step_options("budget")
@plan_file_options
@json_option
def diff(before: str, after: str, as_json: bool, **options: Any) -> None:
    """Say what changed between two plans. Each is a plan file or a MODEL; --config and --budget are for a MODEL.

    \b
    Examples:
      foreplan diff old.plan new.plan
      foreplan diff resnet50:batch=16 resnet50:batch=32 --json
    """
    from foreplan.views.diff import diff as compare

    of_file = settings_from(options)
    of_model = without_plan_file(of_file)
    a, b = (open_compiled(text, of_file if is_plan_file(text) else of_model) for text in (before, after))
    difference = compare(*a.highest, *b.highest)
    if as_json:
        print_json(difference.as_json())
    else:
        echo(str(difference), nl=False)


@command(short_help="Place intervals from a CSV file.")
@click.argument("table", metavar="IN.csv")
@click.option("--capacity", metavar="SIZE", help="Exit with 3 if the buffers do not fit into this.")
@out_option("OUT.csv", "Where to write the offsets; standard output by default.")
@click.option(
    "--effort",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="N",
    help="How long to search if simple rules fail: counted work that takes about N seconds.",
)
@json_option
def place(table: str, capacity: str | None, path: str | None, effort: float, as_json: bool) -> None:
    """Place plain intervals: read a CSV file with the columns id,lower,upper,size, and add an offset column.

    The file may also have columns for alignment, and for the offsets of buffers that are placed already. Lifespans are
    half-open, as in MiniMalloc's format. Without a capacity, the command looks for the lowest height, and prints its
    lower bound too.

    \b
    Examples:
      foreplan place buffers.csv -o placed.csv
      foreplan place buffers.csv --capacity 1048576 -o placed.csv
    """
    from foreplan.base.files import write_atomically
    from foreplan.planner import place_intervals, read_intervals
    from foreplan.planner.placement.intervals import intervals_text

    found = read_intervals(table)
    limit = None if capacity is None else parse_bytes(capacity)
    with working(f"placing {table}"):
        placed = place_intervals(found, limit, round(effort * _WORK_PER_SECOND))
    text = intervals_text(found, placed.offsets.tolist())
    if path is not None:
        write_atomically(path, text)
    gap = placed.height / placed.lower_bound - 1 if placed.lower_bound else 0.0
    if as_json:
        sizes = {"height": placed.height, "lower_bound": placed.lower_bound, "gap": gap, "capacity": limit}
        print_json({"buffers": len(found)} | sizes | {"heuristic": placed.heuristic})
    elif path is None:
        echo(text, nl=False)
    else:
        echo(f"{path}: height {placed.height:,}, lower bound {placed.lower_bound:,}, gap {gap:.2%}")


@command("models", short_help="List the zoo.")
@json_option
def models_command(as_json: bool) -> None:
    """List the zoo.

    \b
    Example:
      foreplan models
    """
    from foreplan import models

    listed = models.describe()
    if as_json:
        print_json(listed)
        return
    width = max(map(len, listed), default=0)
    for name, text in listed.items():
        echo(f"{name:<{width}}  {text}")


COMMANDS = (estimate, plan, verify, view, diff, place, models_command)
