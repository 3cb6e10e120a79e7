"""Figures that were measured: the calibrations that come with foreplan, and the user's own."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreplan.base.errors import TargetError, UsageError
from foreplan.base.files import check_writable, write_atomically
from foreplan.base.home import own_folder

MOST = 1 << 62  # above every figure
_HEAD = """\
# {what}. `foreplan devices --calibrate` writes it, and estimates go by it;
# {page} says what it means.
"""


@dataclass(frozen=True)
class Kind:
    """A kind of thing that is calibrated: cards, processes on the host, or links between them.

    Attributes:
        file: the name of both files: the user's calibrations, in the folder of settings, and those that come with
            foreplan.
        package: that these lie in; empty: none come with foreplan.
        key: what names the thing in an entry, such as `card`.
        always: figures of every calibration.
        perhaps: figures that only some calibrations have.
        assumed: figures that a table assumes where there is no calibration.
        what: is measured, for people.
        page: of the documentation.
    """

    file: str
    package: str
    key: str
    always: tuple[str, ...]
    perhaps: tuple[str, ...]
    assumed: tuple[str, ...]
    what: str
    page: str


@dataclass(frozen=True)
class Calibration:
    """The calibration of one thing.

    Attributes:
        kind: of the thing.
        name: of a card, as its driver has it; or of a machine, or a link.
        versions: of libraries, by name.
        figures: whole numbers, by the keys of the table.
    """

    kind: Kind
    name: str
    versions: Mapping[str, str]
    figures: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """Every figure by its name."""
        return {self.kind.key: self.name, "versions": dict(self.versions), "figures": dict(self.figures)}

    def as_toml(self) -> str:
        """The entry of a table."""
        versions = ", ".join(f"{_quoted(name)} = {_quoted(text)}" for name, text in self.versions.items())
        lines = ["[[calibrated]]", f"{self.kind.key} = {_quoted(self.name)}", f"versions = {{ {versions} }}"]
        lines += [f"{name} = {nbytes:_}" for name, nbytes in self.figures.items()]
        return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class Table:
    """Every calibration, and what is assumed where there is none."""

    assumed: Mapping[str, int]
    calibrated: tuple[Calibration, ...] = field(default=())

    def knows(self, name: str) -> bool:
        """Whether a thing of this name was calibrated."""
        return any(each.name == name for each in self.calibrated)

    def covers(self, name: str, versions: Mapping[str, str]) -> tuple[Calibration | None, bool]:
        """The latest calibration of a thing, and whether it was made with these versions, as far as they are given.

        A calibration with these versions is preferred.
        """
        own = [each for each in self.calibrated if each.name == name]
        same = [each for each in own if all(each.versions.get(name) == text for name, text in versions.items())]
        best = same or own
        return best[-1] if best else None, bool(same)


def read_toml(text: str, wrong: str) -> dict[str, Any]:
    """A TOML file's tables.

    Raises:
        TargetError: it is no TOML file; the message begins with `wrong`.
    """
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TargetError(f"{wrong}: {error}") from None
    waiting: list[Any] = [found]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TargetError(f"{wrong}: a whole number has {value.bit_length()} bits, and TOML's have 63 and a sign")
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found


def read_table(text: str, origin: str, kind: Kind) -> Table:
    """A table of calibrations from TOML; foreplan's own files describe the format.

    Raises:
        TargetError: it is no such table; names its origin and what is wrong.
    """
    assumed = _tables(text, origin).get("assumed")
    return Table(_figures(assumed, f"{origin}, [assumed]", kind.assumed), read_entries(text, origin, kind))


def read_entries(text: str, origin: str, kind: Kind) -> tuple[Calibration, ...]:
    """The entries [[calibrated]] of a table, which need not assume anything.

    Raises:
        TargetError: it is no such table; names its origin and what is wrong.
    """
    entries = _tables(text, origin).get("calibrated", [])
    if not isinstance(entries, list):
        raise TargetError(f"{origin} needs entries [[calibrated]], and has {entries!r}")
    return tuple(_entry(entry, f"{origin}, [[calibrated]] {i + 1}", kind) for i, entry in enumerate(entries))


def _tables(text: str, origin: str) -> dict[str, Any]:
    return read_toml(text, f"{origin} is no table of calibrations")


def _entry(entry: Any, where: str, kind: Kind) -> Calibration:
    name, versions = (entry.get(kind.key), entry.get("versions")) if isinstance(entry, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(versions, dict):
        raise TargetError(f"{where} needs a {kind.key} and versions")
    if not all(isinstance(text, str) for text in versions.values()):
        raise TargetError(f"{where} has versions that are no texts: {versions}")
    if unknown := sorted(set(entry) - {kind.key, "versions", *kind.always, *kind.perhaps}):
        raise TargetError(f"{where} has an unknown key {unknown[0]!r}")
    names = (*kind.always, *(each for each in kind.perhaps if each in entry))
    return Calibration(kind, name, MappingProxyType(versions), _figures(entry, where, names))


def _figures(entry: Any, where: str, names: tuple[str, ...]) -> Mapping[str, int]:
    figures = {}
    for name in names:
        value = entry.get(name) if isinstance(entry, dict) else None
        if type(value) is not int or not 0 <= value < MOST:
            raise TargetError(f"{where} needs {name} as a whole number, and has {repr(value)[:40]}")
        figures[name] = value
    return MappingProxyType(figures)


def own_file(kind: Kind) -> Path | None:
    """Where the user's calibrations of a kind are, in `foreplan` in the folder of settings; None: there is none."""
    folder = own_folder("XDG_CONFIG_HOME", ".config")
    return None if folder is None else folder / kind.file


def own_calibrations(kind: Kind) -> tuple[Calibration, ...]:
    """The user's calibrations of a kind, the latest last.

    Raises:
        TargetError: the file cannot be read or is broken.
    """
    path = own_file(kind)
    if path is None:
        return ()
    try:
        return read_entries(path.read_text(encoding="utf-8"), str(path), kind)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # of a home that is another user's, too
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"the calibrations in {str(path)!r} cannot be read: {error}") from None
    except TargetError as error:
        raise TargetError(f"{error}; repair the file, or delete it and run `foreplan devices --calibrate`") from None


@lru_cache
def _packaged(kind: Kind) -> Table:
    file = importlib.resources.files(kind.package) / kind.file
    return read_table(file.read_text(encoding="utf-8"), file.name, kind)


def known(kind: Kind) -> Table:
    """The calibrations that come with foreplan, then the user's: later ones are preferred.

    Raises:
        TargetError: the user's file cannot be read or is broken.
    """
    table = _packaged(kind)
    return Table(table.assumed, (*table.calibrated, *own_calibrations(kind)))


def writable_file(kind: Kind) -> Path:
    """The user's file; makes its folder.

    Raises:
        UsageError: it cannot be written.
    """
    path = own_file(kind)
    if path is None:
        raise UsageError("there is no place for calibrations: this user has no home; let XDG_CONFIG_HOME name a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"there is no place for calibrations: {str(path.parent)!r} cannot be made: {error.strerror}; "
            f"XDG_CONFIG_HOME names another folder"
        ) from None
    check_writable(path)
    return path


def record(found: Calibration) -> Path:
    """Write a calibration into the user's file, in the place of one of the same thing and versions; returns the file.

    Raises:
        TargetError: there is such a file, and it is broken; it is as it was.
        UsageError, SessionError: the file cannot be written; it is as it was.
    """
    kind, same = found.kind, (found.name, found.versions)
    entries = [*(each for each in own_calibrations(kind) if (each.name, each.versions) != same), found]
    path = writable_file(kind)
    head = _HEAD.format(what=kind.what, page=kind.page)
    write_atomically(path, "\n".join([head, *(each.as_toml() for each in entries)]))
    return path
