"""The command that compares a snapshot of PyTorch's memory with a plan."""

from __future__ import annotations

from typing import Any

import click

from foreplan.cli.compiling import open_compiled, without_plan_file
from foreplan.cli.flags import command, config_option, json_option, plan_file_options, settings_from
from foreplan.cli.options import echo, is_plan_file, print_json


@command(short_help="Compare a snapshot of PyTorch's memory with a plan.")
@click.argument("snapshot", metavar="SNAPSHOT.pickle")
@click.argument("plan")
@config_option
@plan_file_options
@json_option
def compare(snapshot: str, plan: str, as_json: bool, **options: Any) -> None:
    """Compare a snapshot of PyTorch's memory with a plan: the peak, what is alive there, allocations, fragmentation.

    `torch.cuda.memory._dump_snapshot` writes the snapshot. It is read as plain data; nothing in it runs. The plan is a
    plan file or a MODEL.

    \b
    Example:
      foreplan compare snapshot.pickle resnet50:batch=32
    """
    from foreplan.views.compare import Comparison
    from foreplan.views.read_snapshot import read_snapshot

    recorded = read_snapshot(snapshot)
    settings = settings_from(options)
    if not is_plan_file(plan):
        settings = without_plan_file(settings)
    found = Comparison(recorded, open_compiled(plan, settings).memory)
    if as_json:
        print_json(found.as_json())
    else:
        echo(str(found), nl=False)


COMMANDS = (compare,)
