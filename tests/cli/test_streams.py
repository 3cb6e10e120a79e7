"""The command line with standard streams that are closed, full, nobody's, or of an encoding with few characters."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache import kept_files
from tests.cli.shell import MODEL, PROGRAM
from tests.profile import few

COMMANDS = (["--version"], ["--help"], ["models"], ["devices"], ["estimate", MODEL], ["estimate", MODEL, "--json"])
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
LATIN = {"PYTHONIOENCODING": "latin-1"}


def shell(line: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of sh, in which "$@" is foreplan with arguments."""
    command = ["sh", "-c", line, "sh", *PROGRAM, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, errors="replace")


@pytest.mark.parametrize("arguments", few(COMMANDS, (1, 4)), ids=" ".join)
def test_a_pipe_that_nobody_reads_ends_it_as_it_ends_others(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run([*PROGRAM, *arguments], stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", few(COMMANDS, (1, 4)), ids=" ".join)
def test_a_full_disk_is_told(arguments: list[str]) -> None:
    done = shell('"$@" > /dev/full', *arguments)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


@pytest.mark.parametrize("arguments", few(COMMANDS, (1, 4)), ids=" ".join)
def test_closed_streams_lead_nowhere(arguments: list[str]) -> None:
    done = shell('"$@" <&- >&-', *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_written_without_streams_is_whole(tmp_path: Path) -> None:
    """No message gets into a file that has the number of a closed stream, not even one of a C library."""
    plan = tmp_path / "step.plan"
    done = shell('"$@" <&- >&- 2>&-', "plan", MODEL, "-o", plan, OMP_NUM_THREADS="garbage")
    assert done.returncode == 0
    done = shell('"$@" <&- 2>&-', "verify", plan)
    assert done.returncode == 0 and done.stdout
    done = shell('"$@" <&- >&- 2>&-', "estimate", tmp_path / "nothing.onnx")
    assert done.returncode == 2


@pytest.mark.parametrize("number", [0, 1, 2])
def test_no_file_gets_the_number_of_a_closed_stream(number: int) -> None:
    code = "import os; from foreplan.cli.main import _open_streams; _open_streams(); os._exit(os.open('/dev/null', 0))"
    done = subprocess.run(["sh", "-c", f'"$@" {number}>&-', "sh", sys.executable, "-c", code], capture_output=True)
    assert done.returncode > 2


@pytest.mark.parametrize("arguments", few([["models"], ["devices"]]), ids=" ".join)
def test_an_encoding_without_the_characters(arguments: list[str]) -> None:
    """What it lacks is escaped; where there is ASCII alone, click writes UTF-8."""
    expected = shell('"$@"', *arguments, PYTHONIOENCODING="utf-8").stdout
    assert not expected.isascii()
    for environment, encoding in ((LATIN, "latin-1"), (ASCII, "utf-8")):
        done = subprocess.run([*PROGRAM, *arguments], env={**os.environ, **environment}, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == expected.encode(encoding, "backslashreplace")


@pytest.mark.parametrize("environment", few([ASCII, LATIN, {}]), ids=str)
def test_names_that_no_encoding_has(tmp_path: Path, environment: dict[str, str]) -> None:
    plan = tmp_path / "odd ü \udcff.plan"
    for arguments in (["plan", MODEL, "-o", plan], ["verify", plan]):
        done = shell('"$@"', *arguments, **environment)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
def test_a_terminal_is_told_which_function_is_compiled(tmp_path: Path) -> None:
    """Here by a process whose cache is empty."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "FOREPLAN_CACHE_DIR": str(tmp_path), "COLUMNS": "200", "TERM": "xterm"}
    command = [*PROGRAM, "estimate", MODEL]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=end, env=environment)
    os.close(end)
    told = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other end has been closed
        while piece := os.read(terminal, 4096):
            told += piece
    os.close(terminal)
    assert process.wait() == 0
    numbers = re.findall(rb"compiling the planner for this machine, once, some seconds: function (\d+)", told)
    made = {path.name for path in kept_files(tmp_path) if path.suffix == ".o"}
    assert numbers and int(numbers[-1]) <= len(made)
