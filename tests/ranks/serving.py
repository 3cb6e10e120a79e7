"""A job of ranks that runs one command of foreplan after the other: its processes begin once.

mpiexec -n 2 python -m tests.ranks.serving FOLDER

Each rank waits for the words of the next command in a file, without MPI, and writes what has come of it to another.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from click.testing import CliRunner

POLL = 0.01  # seconds from one look for a file to the next
END = "[]"  # words that end the job


class Job:
    """The side that gives commands.

    Args:
        start: the words of the launcher.
        folder: for files of this job alone.
    """

    def __init__(self, start: list[str], ranks: int, folder: Path) -> None:
        self.folder, self.ranks, self.count = folder, ranks, 0
        words = [*start, sys.executable, "-m", "tests.ranks.serving", str(folder)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, words: tuple[str, ...], seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command to its end: the largest exit code, and what all ranks print, one behind the other."""
        _put(self.folder / f"{self.count}.words", json.dumps(words))
        answers, deadline = [self.folder / f"{self.count}.{rank}" for rank in range(self.ranks)], time.monotonic()
        self.count += 1
        while not all(path.exists() for path in answers):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline + seconds, f"{words} has not ended"
            time.sleep(POLL)
        codes, outputs, errors = zip(*(json.loads(path.read_text()) for path in answers))
        return subprocess.CompletedProcess(words, max(codes), "".join(outputs), "".join(errors))

    def end(self) -> None:
        """End the job."""
        _put(self.folder / f"{self.count}.words", END)
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()


def _put(path: Path, text: str) -> None:
    """Write a file that others see when it is whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher has started, in the order of ranks."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            process = int(folder.name)
            above = (_parent(process), _parent(_parent(process)))  # the launcher has a helper on each machine
            line = (folder / "cmdline").read_bytes()
            if launcher in above and b"foreplan" in line and b"-n\0" not in line:
                found.append(process)
    return sorted(found)


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> None:
    """What a rank does."""
    from foreplan.cli import cli
    from foreplan.runtime.launchers import launch_of

    found, folder, count = launch_of(os.environ), Path(sys.argv[1]), 0
    assert found is not None
    while True:
        asked = folder / f"{count}.words"
        while not asked.exists():
            time.sleep(POLL)
        text = asked.read_text()
        if text == END:
            return
        done = CliRunner().invoke(cli, json.loads(text))
        _put(folder / f"{count}.{found.rank}", json.dumps([done.exit_code, done.stdout, done.stderr]))
        count += 1


if __name__ == "__main__":
    main()
