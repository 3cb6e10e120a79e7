"""Logs of a training run: figures of each step, as CSV and for TensorBoard."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Protocol

from foreplan.base.errors import UsageError
from foreplan.base.files import check_writable, open_atomically


class Log(Protocol):
    """Where figures are written, step by step."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step, counted from 1."""


class CsvLog:
    """One line per step. A figure that a step lacks is left empty. Each line is on disk before the next step runs."""

    def __init__(self, file: IO[str], columns: Sequence[str]) -> None:
        self._file, self._columns = file, columns

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a line."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([step, *(figures.get(name, "") for name in self._columns[1:])])
        self._file.write(text.getvalue())
        self._file.flush()


class BoardLog:
    """A folder that TensorBoard reads, written by its own library."""

    def __init__(self, folder: str) -> None:
        """Begin a file in the folder.

        Raises:
            UsageError: the library is not installed, or the folder cannot be written.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise UsageError("--tensorboard needs TensorBoard's library: pip install tensorboard") from None
        self._event, self._summary = Event, Summary
        try:
            self._writer = EventFileWriter(folder)
        except OSError as error:
            raise UsageError(f"cannot write to {folder!r}: {error.strerror or error}") from None

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add an event with a scalar for each figure; TensorBoard groups names before a slash."""
        import time

        values = [
            self._summary.Value(tag=name.replace("validation_", "validation/", 1), simple_value=number)
            for name, number in figures.items()
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


@contextmanager
def open_logs(path: str | None, folder: str | None, columns: Sequence[str], done: int) -> Iterator[list[Log]]:
    """The logs that are asked for.

    Args:
        path: of the CSV file. Where steps are done already, their lines stay, and later ones are left out.
        folder: for TensorBoard.
        columns: of the CSV file; the first is the step's.
        done: steps that a resumed run has behind it.

    Raises:
        UsageError: a file cannot be written, has other columns, or TensorBoard's library is missing.
    """
    with ExitStack() as stack:
        logs: list[Log] = []
        if path is not None:
            _begin(path, columns, done)
            logs.append(CsvLog(stack.enter_context(open(path, "a", encoding="utf-8", newline="")), columns))
        if folder is not None:
            board = BoardLog(folder)
            stack.callback(board.close)
            logs.append(board)
        yield logs


def _begin(path: str, columns: Sequence[str], done: int) -> None:
    """Write the file's first line, and the lines of steps that are done."""
    check_writable(path)
    lines = [",".join(columns)]
    if done and os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            found = file.read().splitlines()
        if found and found[0] != lines[0]:
            raise UsageError(
                f"{path!r} has other columns ({found[0][:80]}) than this run ({lines[0]}): give another file to --log"
            )
        lines += [line for line in found[1:] if (step := line.partition(",")[0]).isdigit() and int(step) <= done]
    with open_atomically(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
