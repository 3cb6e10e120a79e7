"""What `foreplan estimate` says of a step in stages: a row a stage, and the step of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreplan.cli.options import echo, model_with_options, print_json, say, working
from foreplan.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from foreplan.cli.options import Settings

_COLUMNS = ("stage", "parameters", "peak", "of it parameters", "optimizer", "gradients", "activations", "sends", "busy")


def estimate_stages(model: str, settings: Settings, as_json: bool) -> bool:
    """Print what the stages of a model take; whether each fits its card, where that is known."""
    from foreplan.staged import Staged

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
    return (
        f"{figures['model']}, training on {figures['target']}: {figures['stages']} stages on as many ranks, "
        f"{figures['accumulate']} micro-batches; a step is predicted to take "
        f"{format_seconds(figures['predicted_seconds'])}, of which stages stand still {figures['bubble_ratio']:.1%} on "
        f"average; stage {slowest['stage']} computes longest, {format_seconds(slowest['busy_seconds'])}"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    """A row a stage."""
    cells = [list(_COLUMNS)]
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
                format_seconds(row["busy_seconds"]),
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells)
