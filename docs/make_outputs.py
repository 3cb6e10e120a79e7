"""Writes the outputs of commands into pages: every fenced block `console` of README.md and docs/*.md.

    python docs/make_outputs.py                      # all pages
    python docs/make_outputs.py docs/memory.md       # one
    python docs/make_outputs.py --check              # changes nothing; exits with 1 and the differences

A page is run from top to bottom in an empty folder of its own:

- a block `python` whose first line is `# NAME.py` is written to that file;
- a block `console` holds commands, `$ ` before each, and behind each what it printed, errors too. Where a line ends in
  a backslash, the command goes on in the next one. A command must succeed; one that fails on purpose ends with
  `; echo "exit code $?"`.

What depends on the machine is masked before outputs are compared: every number with a unit of time behind it, with
the spaces before it, and nothing else. An output that differs in this only stays as it is. So pages choose commands
whose other figures do not depend on the machine. A command that had to compile the planner, and says so, runs again.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# ([\w/]+\.py)\n")
TIME = re.compile(r"[ +-]*\d[\d,.]* (?:ns|µs|ms|s|min|h)\b")
COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*\n", re.M)
ONCE = "once on this machine"  # what a command says that had to compile the planner
LIMIT = 300  # seconds for a command


def masked(text: str) -> str:
    """The text without what depends on the machine."""
    return TIME.sub(" (time)", text)


def has_commands(page: Path) -> bool:
    """Whether there is something to run on a page."""
    return any(kind == "console" for kind, _ in BLOCK.findall(page.read_text()))


def made_again(page: Path) -> str:
    """The text of a page with the outputs that its commands have now.

    Raises:
        SystemExit: a command fails; names the page, the command and what it printed.
    """
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as settings:
        environment = os.environ | {
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "XDG_CONFIG_HOME": settings,  # nothing that was measured on this machine
            "COLUMNS": "120",
        }
        pieces, end = [], 0
        for block in BLOCK.finditer(text):
            pieces += [text[end : block.start(2)]]
            end = block.end(2)
            kind, body = block.groups()
            if kind == "python":
                _write(Path(folder), body)
                pieces.append(body)
            else:
                pieces += [part for shown in _commands(page, body) for part in _run(page, shown, folder, environment)]
        return "".join((*pieces, text[end:]))


def _write(folder: Path, body: str) -> None:
    if named := FILE.match(body):
        (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
        (folder / named[1]).write_text(body)


def _commands(page: Path, body: str) -> Iterator[tuple[str, str]]:
    """Each command of a block, as it is written there, and its output."""
    starts = [match.span() for match in COMMAND.finditer(body)]
    if not starts or starts[0][0]:
        raise SystemExit(f"{page}: a block `console` begins with `$ ` and a command, not with {body[:40]!r}")
    for (start, middle), (end, _) in zip(starts, [*starts[1:], (len(body), 0)]):
        yield body[start:middle], body[middle:end]


def _run(page: Path, shown: tuple[str, str], folder: str, environment: dict[str, str]) -> tuple[str, str]:
    command, before = shown
    now = _printed(page, command, folder, environment)
    if ONCE in now:
        now = _printed(page, command, folder, environment)
    return command, before if masked(now) == masked(before) else now


def _printed(page: Path, command: str, folder: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command.removeprefix("$ ")],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode:
        raise SystemExit(f"{page}: exit code {done.returncode}\n{command}{done.stdout}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def differences(page: Path) -> str:
    """What the outputs on a page differ in from those that its commands have now; empty if in nothing."""
    lines = (text.splitlines(keepends=True) for text in (page.read_text(), made_again(page)))
    return "".join(difflib.unified_diff(*lines, f"{page.name}, as it is", f"{page.name}, made again"))


def main() -> None:
    """Write the pages that are named, or all; or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    asked = parser.parse_args()
    found = 0
    for page in filter(has_commands, asked.pages):
        print(page.name, file=sys.stderr)
        if asked.check:
            shown = differences(page)
            found += bool(shown)
            print(shown, end="")
        else:
            page.write_text(made_again(page))
    raise SystemExit(found > 0)


if __name__ == "__main__":
    main()
