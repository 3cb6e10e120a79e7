"""The command line as the tests call it, in this process."""

from __future__ import annotations

import json
import sys

from click.testing import CliRunner, Result

from foreplan.cli import cli

PROGRAM = [sys.executable, "-m", "foreplan"]  # in a process of its own
MODEL = "mlp:batch=4,width=8,layers=2,inputs=6,classes=3"


def foreplan(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert done.exit_code == code, done.output + done.stderr
    assert "Traceback" not in done.stderr
    return done


def answer(*arguments: object, code: int = 0) -> dict:
    return json.loads(foreplan(*arguments, "--json", code=code).stdout)
