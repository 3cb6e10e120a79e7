"""The command that shows what less memory costs: pareto."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from foreplan.base.errors import UsageError
from foreplan.base.units import format_bytes
from foreplan.cli.compiling import compile_model, without_recomputation
from foreplan.cli.flags import command, given, json_option, model_options, settings_from
from foreplan.cli.options import echo, print_json, working

BAR = 40  # characters of the longest bar


@command(short_help="Show what less memory costs.")
@model_options
@json_option
def pareto(model: str, as_json: bool, **options: Any) -> None:
    """Show what less memory costs: the arena of a step of MODEL against added flops and predicted time.

    The rows go from no recomputation to the least memory found, with the lowest plans within +1 %, +5 % and +20 % of
    time. Plans that run more of the step in parts are marked.

    \b
    Examples:
      foreplan pareto resnet50 --batch 32
      foreplan pareto model.onnx --optimizer adamw --json
    """
    from foreplan.fit.pareto import pareto as curve

    if written := given("budget", "remat"):
        raise UsageError(f"--{written[0]} makes no sense here: the curve has every budget; `estimate` takes one")
    if given("checkpoint"):
        raise UsageError(
            "--checkpoint makes no sense here: it says what is recomputed, and along the curve the planner chooses; "
            "leave it out, or see the one plan that it gives with `estimate`"
        )
    compiled = compile_model(model, without_recomputation(settings_from(options)))
    with working(f"recomputing parts of {model}"):
        points = curve(compiled)
    if as_json:
        print_json(
            {"model": compiled.program.model, "target": compiled.program.target}
            | {"points": [asdict(point) for point in points]}
        )
        return
    most = points[0].arena_bytes
    offload = bool(compiled.program.copies)
    head = f"{'host':>12}  " if offload else ""
    echo(f"{'arena':>12}  {head}{'time':>8}  {'flops':>8}  instructions")
    for point in points:
        bar = "█" * max(1, round(BAR * point.arena_bytes / most)) + ("  in parts" if point.in_parts else "")
        host = f"{format_bytes(point.host_bytes):>12}  " if offload else ""
        echo(
            f"{format_bytes(point.arena_bytes):>12}  {host}{point.extra_seconds_ratio:>+8.2%}  "
            f"{point.extra_flops_ratio:>+8.2%}  {point.instructions:>12,}  {bar}"
        )


COMMANDS = (pareto,)
