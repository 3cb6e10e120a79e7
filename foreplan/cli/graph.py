"""The command about graphs and passes: graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from foreplan.base.errors import UsageError
from foreplan.base.files import check_writable
from foreplan.base.units import format_seconds
from foreplan.cli.flags import command, json_option, model_options, out_option, settings_from
from foreplan.cli.model import model_with_options
from foreplan.cli.options import echo, is_plan_file, print_json, say

if TYPE_CHECKING:
    from foreplan.passes import Ran

ALL = "all"


@command(short_help="Print the graph of a step, and what each pass makes of it.")
@model_options
@click.option(
    "--print-after",
    "after",
    multiple=True,
    metavar="PASS|all",
    help="Print the graph after a pass, each time it runs; may be given again.",
)
@click.option("--without", multiple=True, metavar="PASS", help="Leave a pass out; may be given again.")
@out_option("FILE", "Write the graph instead: FILE.dot, or FILE.graphml.")
@click.option("--time", "timed", is_flag=True, help="List the passes and their processor time.")
@json_option
def graph(
    model: str,
    after: tuple[str, ...],
    without: tuple[str, ...],
    path: str | None,
    timed: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Print the graph of a step of MODEL as the target gets it, one node per line.

    foreplan/compiler/pipeline.py lists the passes in order.

    \b
    Examples:
      foreplan graph resnet50 --batch 32
      foreplan graph model.onnx --infer --print-after fuse_maps
      foreplan graph gpt2_small --time
      foreplan graph gpt2_small --without fuse_attention --target cpu
      foreplan graph resnet50 -o resnet50.dot
    """
    from foreplan import passes
    from foreplan.compiler.step_graphs import step_graphs

    if is_plan_file(model):
        raise UsageError(f"{model!r} is a plan, which holds no graph: give the model instead")
    if path is not None:
        check_writable(path)
    passes.check_names(name for name in after if name != ALL)
    settings = settings_from(options)
    if without:
        settings = replace(settings, step=replace(settings.step, passes=passes.without(*without)))
    ran: list[Ran] = []
    made, update = step_graphs(*model_with_options(model, settings), ran.append)
    if path is not None:
        from foreplan.views.digraph import write_graph

        write_graph(path, made)
    if as_json:
        print_json({"passes": [_figures(each) for each in ran], "nodes": len(made.nodes)})
        return
    for each in ran:
        if ALL in after or each.entry.name in after:
            echo(f"# after {each.entry.name} ({_told(each)})\n{each.graph.as_text()}")
    if timed:
        echo(_table(ran))
    if path is not None:
        say(f"wrote {path}")
    elif not after and not timed:
        echo(made.as_text(), nl=False)
        if update is not None:
            echo(f"# the update after the micro-batches\n{update.as_text()}", nl=False)


def _figures(ran: Ran) -> dict[str, Any]:
    return {
        "name": ran.entry.name,
        "stage": str(ran.entry.stage),
        "seconds": ran.seconds,
        "nodes": len(ran.graph.nodes),
        "changed": ran.changed,
    }


def _told(ran: Ran) -> str:
    change = "" if ran.changed else ", nothing changed"
    return f"{ran.entry.stage}, {format_seconds(ran.seconds)}, {len(ran.graph.nodes):,} nodes{change}"


def _table(ran: Iterable[Ran]) -> str:
    """One row per pass: its stage, processor time, and the nodes of the graph after it."""
    lines = [f"{'pass':<20}{'stage':<10}{'time':>10}{'nodes':>9}"]
    for each in ran:
        nodes = f"{len(each.graph.nodes):,}" if each.changed else "same"
        lines.append(f"{each.entry.name:<20}{each.entry.stage:<10}{format_seconds(each.seconds):>10}{nodes:>9}")
    lines.append(f"{'all':<30}{format_seconds(sum(each.seconds for each in ran)):>10}")
    return "\n".join(lines)


COMMANDS = (graph,)
