"""Commands that pages show with their output: run anew, and written into the page by `python -m tests.pages PAGE`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from foreplan.cli import cli

_BLOCK = re.compile(r"```text\n\$ (foreplan [^\n]*)\n(.*?)```", re.S)
_TIME = re.compile(r"planned in [\d.,]+ \w+")


def output(command: str) -> str:
    """What a command prints, without the time that planning took."""
    done = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output + done.stderr
    return _TIME.sub("planned in … s", done.stdout)


def made_anew(text: str, run: Callable[[str], str] = output) -> str:
    """A page with the output of its commands."""
    return _BLOCK.sub(lambda found: f"```text\n$ {found[1]}\n{run(found[1])}```", text)


def main() -> None:
    """Write the output into pages."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(made_anew(path.read_text()))


if __name__ == "__main__":
    main()
