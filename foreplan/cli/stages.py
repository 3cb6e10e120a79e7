"""Steps in stages at the command line: what `foreplan estimate` says of them, and what each takes of the data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import InputError
from foreplan.base.units import format_bytes, format_count, format_seconds
from foreplan.cli.array_file import ArrayFile
from foreplan.cli.data import samples_in
from foreplan.cli.model import model_with_options
from foreplan.cli.options import echo, print_json, say, working

if TYPE_CHECKING:
    from foreplan.cli.settings import Settings
    from foreplan.lower import Program
    from foreplan.runtime.ranks import World

_COLUMNS = ("stage", "parameters", "peak", "of it parameters", "optimizer", "gradients", "activations", "sends")
_WITHIN, _BUSY = "within", "busy"  # what a rank sends within its stage, where that has several; when it computes


def estimate_stages(model: str, settings: Settings, as_json: bool) -> bool:
    """Print what the stages of a model take; whether each fits its card, where that is known."""
    from foreplan.compiler.staged import Staged

    with working(f"compiling {model} in {settings.step.stages} stages"):
        staged = Staged.of(*model_with_options(model, settings))
        figures = staged.estimate()
    fits = all(row["fits"] is not False for row in figures["by_stage"])
    if as_json:
        print_json(figures)
        return fits
    echo(_headline(figures))
    echo()
    echo(_table(figures["by_stage"]))
    echo()
    echo(str(staged.layout.as_text()), nl=False)
    for note in dict.fromkeys(note for step in staged.steps for note in step.program.notes):
        say(f"note: {note}")
    for stage, step in enumerate(staged.steps):
        if step.verdict.fits is not None:
            echo(f"stage {stage}: {step.verdict}")
    return fits


def _headline(figures: dict[str, Any]) -> str:
    slowest = figures["by_stage"][figures["slowest_stage"]]
    ranks, stages = figures["ranks"], figures["stages"]
    where = "as many ranks" if ranks == stages else f"{ranks} ranks, {ranks // stages} each"
    return (
        f"{figures['model']}, training on {figures['target']}: {stages} stages on {where}, "
        f"{figures['accumulate']} micro-batches; a step is predicted to take "
        f"{format_seconds(figures['predicted_seconds'])}, of which stages stand still {figures['bubble_ratio']:.1%} on "
        f"average; stage {slowest['stage']} computes longest, {format_seconds(slowest['busy_seconds'])}"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    """One row per stage."""
    several = any(row["exchanged_bytes"] for row in rows)
    cells = [[*_COLUMNS, *([_WITHIN] if several else []), _BUSY]]
    for row in rows:
        categories = row["categories"]
        parts = (categories[name] for name in ("parameters", "optimizer_state", "gradients", "activations"))
        cells.append(
            [
                str(row["stage"]),
                format_count(row["parameters"]),
                format_bytes(row["peak_bytes"]),
                *map(format_bytes, parts),
                format_bytes(row["sent_bytes"]),
                *([format_bytes(row["exchanged_bytes"])] if several else []),
                format_seconds(row["busy_seconds"]),
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells)


def samples_of_stages(
    program: Program, arrays: ArrayFile, path: str, micro_batches: int, world: World
) -> tuple[int, int, ArrayFile]:
    """How many samples a data file has, how many of them a micro-batch takes, and the arrays that this stage reads: one
    that no stage reads is an error, as everywhere. All ranks call it at the same time.

    Raises:
        InputError: see `samples_in`; or stages would take different numbers of samples.
    """
    from foreplan.runtime.world.agreement import together

    slots = program.required_inputs
    told = world.gather([slot.name for slot in slots], "what stages read")
    read = {name for names in told for name in names}
    own = arrays.only(name for name in arrays if name in told[world.rank] or name not in read)
    of_one = [slot.operand for slot in slots]
    if micro_batches > 1:
        of_one = [replace(x, type=x.type.with_shape(x.type.shape[1:])) for x in of_one]
    inputs = tuple(replace(slot, operand=x) for slot, x in zip(slots, of_one, strict=True))
    with together(world, "the data"):
        found = samples_in(replace(program, inputs=inputs), own, path) if slots else None
    counts = {each for each in world.gather(found, "the samples of stages") if each is not None}
    if len(counts) != 1:
        raise InputError(f"{path!r}: stages would take different numbers of samples: {sorted(counts)}")
    samples, batch = counts.pop()
    return samples, batch, own
