"""Files of `--config`: options of a step in TOML."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import click
from click.testing import CliRunner

from foreplan.base.errors import UsageError
from foreplan.cli import cli
from foreplan.cli.config import TABLE
from foreplan.cli.flags import Flag
from foreplan.cli.settings import OF_MODEL, OF_STEP
from tests.fuzz import arguments, devices
from tests.fuzz.mutate import damaged
from tests.fuzz.target import Target

TEXTS = (*arguments.TEXTS, *arguments.OPTIMIZERS, *arguments.SCHEDULES, *arguments.SIZES, "axes.npy", "cuda:card.toml")
VALUES = (*devices.VALUES, *arguments.NUMBERS, "true", "false", '["*"]', "{h = 2}", "{x = [2, 3]}", '{"hidden0" = 2}')


def _value(rng: random.Random, name: str) -> str:
    """A value in TOML: half of them of the kind that the key's flag takes."""
    flag = _flags().get(name)
    if flag is None or rng.random() < 0.5:
        return rng.choice(VALUES) if rng.random() < 0.5 else f"'{rng.choice(TEXTS)}'"
    if flag.is_flag:
        return rng.choice(("true", "false"))
    text = arguments.value(rng, "estimate", flag)
    bare = text.isdecimal() or not isinstance(flag.type, click.Choice | type(click.UNPROCESSED))
    return text if bare else f"['{text}']" if flag.multiple else f"'{text}'"


@cache
def _flags() -> dict[str, Flag]:
    return {str(each.name): each for each in cli.commands["estimate"].params if isinstance(each, Flag)}


def _draw(rng: random.Random) -> bytes:
    lines = []
    for head, known in (("", OF_STEP), (f"[{TABLE}]", OF_MODEL)):
        if head and rng.random() < 0.8:
            lines.append(head)
        for name in rng.sample([*known, "no.such", TABLE], rng.randrange(3)):
            lines.append(f"{name} = {_value(rng, name)}")
    content = "\n".join(lines).encode(errors="surrogatepass")
    return damaged(rng, content) if rng.random() < 0.2 else content


def _run(content: bytes, folder: Path) -> None:
    path = folder / "step.toml"
    path.write_bytes(content)
    (folder / "card.toml").write_bytes(devices.GOOD.read_bytes())
    done = CliRunner().invoke(cli, ["estimate", arguments.MODEL, "--config", str(path)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert "Traceback" not in done.stderr
    if done.exit_code:
        assert done.stderr.strip(), "no word of what is wrong"
        raise UsageError(done.stderr)


def _prepare() -> None:
    arguments.TARGET.prepare()
    devices.TARGET.prepare()


TARGET = Target("configs", _draw, _run, _prepare, sample=100)
