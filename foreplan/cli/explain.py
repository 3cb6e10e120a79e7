"""The command that explains a step's memory: explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foreplan.base.units import listed
from foreplan.cli.compiling import at_batch, open_compiled
from foreplan.cli.flags import command, json_option, model_options, settings_from
from foreplan.cli.model import model_with_options
from foreplan.cli.options import echo, is_plan_file, print_json, working

if TYPE_CHECKING:
    from foreplan.graph import Graph
    from foreplan.lower.fallbacks import Fallback


@command(short_help="Explain why a step needs its memory, and what would reduce it.")
@model_options
@json_option
def explain(model: str, as_json: bool, **options: Any) -> None:
    """Explain the memory of a step of MODEL: where the peak is, what is alive there and what it waits for, what the
    planner did, and how much each change would save. All figures are computed.

    MODEL may be a plan file. Then the answer leaves out what needs the model itself.

    \b
    Examples:
      foreplan explain resnet50 --batch 32
      foreplan explain model.onnx --optimizer adamw --json
      foreplan explain resnet50.plan
    """
    from foreplan.lower.fallbacks import fallbacks

    settings = settings_from(options)
    compiled = open_compiled(model, settings)

    def rebuild(batch: int) -> Graph:
        return model_with_options(model, at_batch(settings, batch))[0]

    with working(f"trying what would change the memory of {model}"):
        told = compiled.explain(None if is_plan_file(model) else rebuild)
    slower = fallbacks(compiled.program)
    if as_json:
        print_json(told.to_json() | {"fallbacks": [asdict(each) for each in slower]})
        return
    echo(str(told), nl=False)
    if slower:
        echo()
        echo(_fallback_table(slower))


def _fallback_table(found: Sequence[Fallback]) -> str:
    """One row per op that falls back to NumPy's kernel: how often, and in which nodes."""
    lines = [f"{'by NumPy':<22}{'actions':>9}  nodes"]
    for each in found:
        lines.append(f"{each.op:<22}{each.count:>9,}  {listed(each.nodes, 4)}")
    return "\n".join(lines)


COMMANDS = (explain,)
