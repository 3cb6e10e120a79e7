"""The command line: results on standard output, progress on standard error, exit codes that scripts can rely on."""

from __future__ import annotations

import errno
import os
import sys
from typing import IO, Any

import click

from foreplan import __version__, cli_memory, cli_run
from foreplan.cli_options import print_json
from foreplan.errors import DoesNotFitError, ForeplanError

INTERRUPTED, PIPE_CLOSED, DOES_NOT_FIT = 130, 141, 3  # the first two as a shell reports SIGINT and SIGPIPE


class Failure(click.ClickException):
    """An error told in one message, without a traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click calls it a class variable and reads the instance's

    def show(self, file: IO[Any] | None = None) -> None:
        """Print `error: …` on standard error."""
        click.echo(f"error: {self.message}", err=True, file=file)


class Commands(click.Group):
    """A group that turns every expected error into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here a closed pipe can still be told from success
            return result
        except DoesNotFitError as error:
            if ctx.meta.get("json"):
                print_json(
                    {
                        "error": "does not fit",
                        "needed_bytes": error.needed,
                        "capacity_bytes": error.capacity,
                        "lower_bound_bytes": error.lower_bound,
                    }
                )
            raise Failure(str(error), error.exit_code) from None
        except ForeplanError as error:
            raise Failure(str(error), error.exit_code) from None
        except KeyboardInterrupt:
            raise Failure("interrupted", INTERRUPTED) from None
        except MemoryError as error:
            detail = f": {error}" if str(error) else ""
            raise Failure(f"this machine has too little memory{detail}", DOES_NOT_FIT) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                _silence_stdout()
                ctx.exit(PIPE_CLOSED)
            raise Failure(_os_error_text(error), 2) from None


def _os_error_text(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename!r}: {reason}" if error.filename else reason


def _silence_stdout() -> None:
    """Let what is still buffered go nowhere: nobody reads it, and flushing it at exit would fail again."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="foreplan")
def cli() -> None:
    """Plan the memory of a whole training step before it runs, then run it.

    MODEL is an .onnx file or the name of a zoo model, such as resnet50 or mlp:width=64,batch=16
    (`foreplan models` lists them). Results go to standard output, progress to standard error.

    Exit codes: 0 fine, 1 a check failed, 2 wrong use, 3 does not fit.
    """


for command in (*cli_memory.COMMANDS, *cli_run.COMMANDS):
    cli.add_command(command)


def main() -> None:
    """The `foreplan` program."""
    cli(prog_name="foreplan")


if __name__ == "__main__":
    main()
