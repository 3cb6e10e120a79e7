"""What is said of an option, in the metadata of its field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass
from typing import Any

Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Said:
    """What is said of an option besides its name, type and default.

    Attributes:
        help: one sentence for people, of `--help` and of docstrings.
        more: what else docstrings say.
        check: from name and value to the value that is kept; raises UsageError.
        flag: of the command line, such as "--budget"; empty: there is none.
        value: what stands for its value in `--help`, such as SIZE.
        choices: the only values, where there are some to choose from.
        least: the smallest value of a whole number.
        words: texts that may stand for the number.
    """

    help: str
    more: str = ""
    check: Check | None = None
    flag: str = ""
    value: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None
    words: tuple[str, ...] = ()


def says(help: str, **said: Any) -> dict[str, Said]:
    """The metadata of an option's field; see `Said`."""
    return {"said": Said(help, **said)}


def said_of(option: Field[Any]) -> Said:
    """What is said of a field of `Options`."""
    said: Said = option.metadata["said"]
    return said
