"""Help, checks and flags of an option, in the metadata of its field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from functools import partial
from typing import Any

from foreplan.base.arguments import choice, whole

Check = Callable[[str, Any], Any]
Files = Callable[[Any, Callable[[str], str]], Any]


@dataclass(frozen=True)
class OptionInfo:
    """An option besides its name, type and default.

    Attributes:
        help: one sentence for people, of `--help` and of docstrings.
        group: the heading in `--help` under which it stands.
        more: what else docstrings say.
        check: from name and value to the value that is kept; raises UsageError.
        flag: of the command line, such as "--budget"; empty: there is none.
        value: what stands for its value in `--help`, such as SIZE.
        choices: the only values, where there are some to choose from.
        least: the smallest value of a whole number.
        words: texts that may stand for the number.
        files: from a value, and a function of a file's name, to the value with each file's name replaced; None: a value
            names no file.
        several: whether its flag may be given again, as that of each option whose default is ().
        in_files: whether a file of options may say it. What trusts a file with something is for the user alone.
        of_model: whether it is of a model, and a graph that has its backward pass already takes no other value.
        with_stages: whether a step of several stages takes it.
    """

    help: str
    group: str = ""
    more: str = ""
    check: Check | None = None
    flag: str = ""
    value: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None
    words: tuple[str, ...] = ()
    files: Files | None = None
    several: bool = False
    in_files: bool = True
    of_model: bool = False
    with_stages: bool = True

    def kept(self, name: str, value: Any) -> Any:
        """The value that is kept of one that was given.

        Raises:
            UsageError: the option does not take it.
        """
        if self.check is not None:
            return self.check(name, value)
        if self.choices:
            return choice(name, value, self.choices)
        if self.least is not None and value not in self.words:
            return whole(name, value, self.least)
        return value


def option(help: str, **info: Any) -> dict[str, OptionInfo]:
    """The metadata of an option's field; see `OptionInfo`."""
    return {"info": OptionInfo(help, **info)}


def grouped(group: str) -> Callable[..., dict[str, OptionInfo]]:
    """`option` for the options of one group."""
    return partial(option, group=group)


def keep_checked(options: Any) -> None:
    """Check the fields of a frozen dataclass, and keep what checks give. None stays where it is the default.

    Raises:
        UsageError: a value that an option does not take.
    """
    for each in fields(options):
        if "info" in each.metadata and not (each.default is None and getattr(options, each.name) is None):
            object.__setattr__(options, each.name, info_of(each).kept(each.name, getattr(options, each.name)))


def info_of(field: Field[Any]) -> OptionInfo:
    """The metadata of a field of `Options`."""
    info: OptionInfo = field.metadata["info"]
    return info
