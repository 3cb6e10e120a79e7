"""Options as flags in groups: of a step, as their fields say it, and of all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from functools import partial
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from foreplan.base.arguments import flag
from foreplan.cli.config import read_config
from foreplan.cli.settings import FIELDS, OF_MODEL, OF_STEP, Settings
from foreplan.options import Options
from foreplan.options import checks as option_checks
from foreplan.options.fields import info_of

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OWN, OUTPUT = "Options", "Output"  # the groups of what is no option of a step
# Parameters of commands that a plan file leaves no choice about; the learning rate is an input of the step.
DECIDED = tuple(name for name, each in FIELDS.items() if info_of(each).in_files and name != "rate")


class Grouped(click.Option):
    """An option under a heading of `--help`."""

    def __init__(self, *args: Any, group: str = _OWN, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class Flag(Grouped):
    """A field of a step's options as a flag. What is not written is as the file of --config has it, or the default."""

    def __init__(self, *args: Any, field: Field[Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.field = field

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The value as the field takes it; one of the file was checked when that was read."""
        source = ctx.get_parameter_source(str(self.name))
        if source is ParameterSource.DEFAULT_MAP:
            return value
        found = super().process_value(ctx, value)
        return found if source is ParameterSource.COMMANDLINE else self.field.default


class Command(click.Command):
    """A command whose `--help` has its options in groups: those of the command first, its output last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group."""
        for group, listed in in_groups(self.get_params(ctx)).items():
            with formatter.section(group):
                formatter.write_dl([record for each in listed if (record := each.get_help_record(ctx)) is not None])


command = partial(click.command, cls=Command)


def in_groups(parameters: Iterable[click.Parameter]) -> dict[str, list[click.Option]]:
    """Options by their group, in the order of groups."""
    found: dict[str, list[click.Option]] = {_OWN: []}
    for each in parameters:
        if isinstance(each, click.Option):
            group = each.group if isinstance(each, Grouped) else OUTPUT if "--help" in each.opts else _OWN
            found.setdefault(group, []).append(each)
    found[OUTPUT] = found.pop(OUTPUT, [])
    return {group: listed for group, listed in found.items() if listed}


json_option = click.option("--json", "as_json", is_flag=True, cls=Grouped, group=OUTPUT, help="Print one JSON object.")


def out_option(value: str, help: str, required: bool = False) -> Callable[[_Function], _Function]:
    """`-o`: the file that a command writes."""
    return click.option("-o", "--out", "path", metavar=value, required=required, cls=Grouped, group=OUTPUT, help=help)


def _read(context: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is not None:
        context.meta["config"], context.meta["reading"] = path, True
        context.default_map = read_config(path)
        context.meta["reading"] = False


config_option = click.option(
    "--config",
    metavar="FILE.toml",
    is_eager=True,
    expose_value=False,
    callback=_read,
    cls=Grouped,
    group="Model",
    help="Read options of the step from a file. Flags override it.",
)


def model_options(function: _Function) -> _Function:
    """MODEL and everything that says how to make a step of it."""
    return model_options_without()(function)


def model_options_without(*left_out: str) -> Callable[[_Function], _Function]:
    """The same, but for some options of `compile`, which a command has in a form of its own."""
    names = [name for name in FIELDS if name not in left_out]

    def decorate(function: _Function) -> _Function:
        return click.argument("model")(config_option(step_options(*names)(function)))

    return decorate


def step_options(*names: str) -> Callable[[_Function], _Function]:
    """Some options of a step, as flags."""

    def decorate(function: _Function) -> _Function:
        for name in reversed(names):
            function = _option(name, FIELDS[name])(function)
        return function

    return decorate


plan_file_options = step_options(*(name for name, each in FIELDS.items() if not info_of(each).in_files))


def _option(name: str, each: Field[Any]) -> Callable[[_Function], _Function]:
    """A field as a flag."""
    info, text = info_of(each), info_of(each).help
    kind: click.ParamType = click.UNPROCESSED
    option = partial(click.option, info.flag, name, cls=Flag, field=each, group=info.group)
    if info.check is flag:
        return option(is_flag=True, help=text)
    if each.default == () or info.several:
        text = text.removesuffix(".") + "; may be given again."
        return option(multiple=True, metavar=info.value, help=text)
    if info.choices:
        kind = click.Choice(info.choices)
    elif info.least is not None:
        kind = _Whole(info.least, info.words)
    elif info.check is option_checks.number:
        kind = click.FLOAT
    shown = each.default not in (None, "")
    return option(type=kind, default=each.default, show_default=shown, metavar=info.value or None, help=text)


class _Whole(click.ParamType):
    """A whole number, or a word that stands for one."""

    name = "whole"

    def __init__(self, least: int, words: tuple[str, ...]) -> None:
        self.number, self.words = click.IntRange(min=least), words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word, or the number."""
        return value if value in self.words else self.number.convert(value, param, ctx)


def settings_from(options: dict[str, Any]) -> Settings:
    """The settings among a command's parsed options, which are taken out of them.

    What the command has no flag for is as the file of --config has it, or the default.
    """
    file = file_options()
    found = {name: options.pop(name, file.get(name, each.default)) for name, each in FIELDS.items()}
    return Settings(**{name: found[name] for name in OF_MODEL}, step=Options(**{name: found[name] for name in OF_STEP}))


def given(*names: str) -> list[str]:
    """Which of a command's parameters the user has written, there or in the file of --config, as against defaults."""
    context, file = click.get_current_context(), file_options()
    return [n for n in names if n in file or context.get_parameter_source(n) is ParameterSource.COMMANDLINE]


def file_options() -> Mapping[str, Any]:
    """What the file of --config says, by name."""
    return click.get_current_context().default_map or {}


def flag_of(name: str) -> str:
    """The flag of an option of a step, such as --output for `outputs`."""
    return info_of(FIELDS[name]).flag
