"""The command line: results on standard output, progress on standard error, exit codes that scripts can rely on."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any

import click

from foreplan.base.errors import DoesNotFitError, ForeplanError, UsageError
from foreplan.cli import budget, compare, devices, explain, export, fit, graph, memory, run, train
from foreplan.cli.job import OF_RANKS, end_job, rank_of_job, tell
from foreplan.cli.options import print_json
from foreplan.version import VERSION

INTERRUPTED, PIPE_CLOSED, DOES_NOT_FIT = 130, 141, 3  # the first two as a shell reports SIGINT and SIGPIPE


class Failure(click.ClickException):
    """An error told in one message, without a traceback."""

    def __init__(self, message: str, exit_code: int, of_ranks: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click calls it a class variable and reads the instance's
        self.of_ranks = of_ranks

    def show(self, file: IO[Any] | None = None) -> None:
        """Print `error: …` on standard error."""
        tell(self.message, of_ranks=self.of_ranks)


class Misuse(Failure):
    """A command that is written wrongly: how it is used is told as well."""

    def __init__(self, error: click.UsageError, of_ranks: bool) -> None:
        super().__init__(error.format_message(), error.exit_code, of_ranks)
        self.error = error

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the usage and the error."""
        tell(self.message, self.error.show, self.of_ranks)


class Commands(click.Group):
    """A group that turns every expected error into a message and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether JSON is asked for, before anything can go wrong; answer `--version` and `--help`."""
        ctx.meta["json"] = "--json" in args
        with _written(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        with _written(ctx):
            result = _invoke(ctx, super().invoke)
            sys.stdout.flush()  # here a closed pipe can still be told from success
            return result


@contextlib.contextmanager
def _written(ctx: click.Context) -> Iterator[None]:
    """End with a message if a command is wrong or a file cannot be read or written; with a closed pipe, end as other
    programs do.
    """
    try:
        yield
    except click.UsageError as error:
        raise Misuse(error, ctx.invoked_subcommand in OF_RANKS) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            _silence_stdout()
            ctx.exit(PIPE_CLOSED)
        raise Failure(_os_error_text(error), 2) from None


def _invoke(ctx: click.Context, run: Callable[[click.Context], Any]) -> Any:
    """Run a command. With --json, an error is printed as the only object on standard output, too."""
    try:
        return run(ctx)
    except click.UsageError as error:
        _print_error(ctx, error, error.format_message(), error.exit_code)
        raise
    except ForeplanError as error:
        also = f"; options are also from {ctx.meta['config']!r}" if _may_be_of_config(ctx, error) else ""
        _print_error(ctx, error, f"{error}{also}", error.exit_code)
        apart = ctx.invoked_subcommand in OF_RANKS and ctx.meta.get("reading", False)  # ranks have not met yet
        raise Failure(f"{error}{also}", error.exit_code, apart) from None
    except KeyboardInterrupt as error:
        _print_error(ctx, error, "interrupted", INTERRUPTED)
        raise Failure("interrupted", INTERRUPTED) from None
    except MemoryError as error:
        message = f"this machine has too little memory{f': {error}' if str(error) else ''}"
        _print_error(ctx, error, message, DOES_NOT_FIT)
        raise Failure(message, DOES_NOT_FIT) from None


def _may_be_of_config(ctx: click.Context, error: ForeplanError) -> bool:
    """Whether what is wrong may stand in the file of --config, which the message does not name."""
    return isinstance(error, UsageError) and "config" in ctx.meta and repr(ctx.meta["config"]) not in str(error)


def _print_error(ctx: click.Context, error: BaseException, message: str, exit_code: int) -> None:
    """`{"error": "does not fit", "message": …, "exit_code": 3, …}`, where JSON was asked for and not printed yet; of
    several ranks, by the first one.
    """
    if not ctx.meta.get("json") or ctx.meta.get("printed") or rank_of_job() > 0:
        return
    name = "Interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__.removesuffix("Error")
    kind = re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
    figures = {}
    if isinstance(error, DoesNotFitError):
        figures = {
            "needed_bytes": error.needed,
            "capacity_bytes": error.capacity,
            "lower_bound_bytes": error.lower_bound,
        }
    print_json({"error": kind, "message": message, "exit_code": exit_code} | figures)


def _os_error_text(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename!r}: {reason}" if error.filename else reason


def _silence_stdout() -> None:
    """Let what is still buffered go nowhere: nobody reads it, and flushing it at exit would fail again."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _open_streams() -> None:
    """Let standard streams take whatever is written: a closed one leads nowhere, and what an encoding lacks is escaped.

    The next file to be opened, such as a checkpoint, would have a closed one's number, by which libraries write to it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # with the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="foreplan")
def cli() -> None:
    """Plan the memory of a whole training step before it runs, then run it.

    MODEL is an .onnx file, a .pt2 file of torch.export.save, a function package.module:make that gives a
    PyTorch module and its example, or the name of a zoo model, such as resnet50 or mlp:width=64,batch=16
    (`foreplan models` lists them). Results go to standard output, progress to standard error.

    Exit codes: 0 fine, 1 a check failed, 2 wrong use, 3 does not fit.
    """


for module in (memory, explain, compare, budget, fit, graph, run, train, export, devices):
    for command in module.COMMANDS:
        cli.add_command(command)


def main() -> None:
    """The `foreplan` program."""
    _open_streams()
    try:
        cli(prog_name="foreplan")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if 0 < code < 128:  # a signal has reached all ranks
            end_job(code)
        raise
    except BaseException:
        traceback.print_exc()
        end_job(1)
        raise SystemExit(1) from None
