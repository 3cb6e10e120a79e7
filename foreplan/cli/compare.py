"""The command that lays a snapshot of PyTorch's memory beside a plan."""

from __future__ import annotations

from dataclasses import replace

import click

from foreplan.cli.compiling import open_compiled
from foreplan.cli.options import echo, is_plan_file, json_option, plan_file_options, print_json
from foreplan.options import Options


@click.command(short_help="Lay a snapshot of PyTorch's memory beside a plan.")
@click.argument("snapshot", metavar="SNAPSHOT.pickle")
@click.argument("plan")
@plan_file_options
@json_option
def compare(snapshot: str, plan: str, trust_code: bool, weights_folder: str | None, as_json: bool) -> None:
    """Lay a snapshot of PyTorch's memory beside a plan: peak, what is alive there, allocations, fragmentation.

    The snapshot is what `torch.cuda.memory._dump_snapshot` writes. It is read as plain data; nothing in it runs. The
    plan is a plan file or a MODEL.

    \b
    Example:
      foreplan compare snapshot.pickle resnet50:batch=32
    """
    from foreplan.cli.options import Settings
    from foreplan.views.compare import Comparison
    from foreplan.views.read_snapshot import read_snapshot

    recorded = read_snapshot(snapshot)
    settings = Settings(step=Options())
    if is_plan_file(plan):
        settings = replace(settings, trust_code=trust_code, weights_folder=weights_folder)
    found = Comparison(recorded, open_compiled(plan, settings).memory)
    if as_json:
        print_json(found.as_json())
    else:
        echo(str(found), nl=False)


COMMANDS = (compare,)
