"""The command line, `foreplan`: a file for the commands of one kind each."""

from foreplan.cli.main import cli, main

__all__ = ["cli", "main"]
