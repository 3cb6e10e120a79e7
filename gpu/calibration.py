"""What was measured of cards outside the arena: the table that comes with foreplan, and the user's own."""

from __future__ import annotations

import importlib.resources
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreplan.errors import TargetError, UsageError
from foreplan.files import check_writable, write_atomically
from foreplan.gpu.device import Device

LIBRARIES = ("cudnn", "cublaslt")
ALWAYS = ("context_bytes", "code_bytes", "graph_bytes_per_launch")  # figures of every calibration
OF_LIBRARIES = tuple(f"{name}_bytes" for name in LIBRARIES)  # of those with which it was made
_HEAD = """\
# What processes hold on cards besides their arenas. `foreplan devices --calibrate` writes it, and estimates go by it;
# docs/cuda.md says what it means.
"""


@dataclass(frozen=True)
class Calibration:
    """What was measured on one card.

    Attributes:
        card: as its driver calls it.
        versions: of `driver`, `cuda`, `cudnn` and `cupy`.
        figures: bytes, by the keys of the table; of libraries, those that were there.
    """

    card: str
    versions: Mapping[str, str]
    figures: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """Every figure by its name."""
        return {"card": self.card, "versions": dict(self.versions), "figures": dict(self.figures)}

    def as_toml(self) -> str:
        """The entry of a table."""
        versions = ", ".join(f"{_quoted(name)} = {_quoted(text)}" for name, text in self.versions.items())
        lines = ["[[calibrated]]", f"card = {_quoted(self.card)}", f"versions = {{ {versions} }}"]
        lines += [f"{name} = {nbytes:_}" for name, nbytes in self.figures.items()]
        return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class Table:
    """Every calibration, and what is assumed where there is none."""

    assumed: Mapping[str, int]
    calibrated: tuple[Calibration, ...] = field(default=())

    def knows(self, device: Device) -> bool:
        """Whether a card of this name was calibrated."""
        return any(each.card == device.title for each in self.calibrated)

    def covers(self, device: Device, versions: Mapping[str, str]) -> tuple[Calibration | None, bool]:
        """The calibration of a card, the latest, and whether it was made with these versions, as far as they are given.

        One with these versions comes before any other.
        """
        own = [each for each in self.calibrated if each.card == device.title]
        same = [each for each in own if all(each.versions.get(name) == text for name, text in versions.items())]
        best = same or own
        return best[-1] if best else None, bool(same)


def read_table(text: str, origin: str) -> Table:
    """A table of calibrations from TOML; `calibration.toml` says how it is written.

    Raises:
        TargetError: it is no such table; names its origin and what is wrong.
    """
    assumed = _parsed(text, origin).get("assumed")
    names = ("context_bytes_per_thread", *ALWAYS[1:], *OF_LIBRARIES)
    return Table(_figures(assumed, f"{origin}, [assumed]", names), read_entries(text, origin))


def read_entries(text: str, origin: str) -> tuple[Calibration, ...]:
    """The entries [[calibrated]] of a table, which need not assume anything.

    Raises:
        TargetError: it is no such table; names its origin and what is wrong.
    """
    entries = _parsed(text, origin).get("calibrated", [])
    if not isinstance(entries, list):
        raise TargetError(f"{origin} needs entries [[calibrated]], and has {entries!r}")
    return tuple(_entry(entry, f"{origin}, [[calibrated]] {i + 1}") for i, entry in enumerate(entries))


def _parsed(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TargetError(f"{origin} is no table of calibrations: {error}") from None


def _entry(entry: Any, where: str) -> Calibration:
    card, versions = (entry.get("card"), entry.get("versions")) if isinstance(entry, dict) else (None, None)
    if not isinstance(card, str) or not isinstance(versions, dict):
        raise TargetError(f"{where} needs a card and versions")
    if not all(isinstance(text, str) for text in versions.values()):
        raise TargetError(f"{where} has versions that are no texts: {versions}")
    if unknown := sorted(set(entry) - {"card", "versions", *ALWAYS, *OF_LIBRARIES}):
        raise TargetError(f"{where} has an unknown key {unknown[0]!r}")
    names = (*ALWAYS, *(name for name in OF_LIBRARIES if name in entry))
    return Calibration(card, MappingProxyType(versions), _figures(entry, where, names))


def _figures(entry: Any, where: str, names: tuple[str, ...]) -> Mapping[str, int]:
    figures = {}
    for name in names:
        value = entry.get(name) if isinstance(entry, dict) else None
        if type(value) is not int or value < 0:
            raise TargetError(f"{where} needs {name} as a number of bytes, and has {value!r}")
        figures[name] = value
    return MappingProxyType(figures)


@lru_cache(maxsize=1)
def _packaged() -> Table:
    file = importlib.resources.files("foreplan.gpu") / "calibration.toml"
    return read_table(file.read_text(encoding="utf-8"), file.name)


def own_file() -> Path:
    """Where the user's calibrations are: `foreplan/calibration.toml` in the folder of the user's settings."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "foreplan" / "calibration.toml"


def _own() -> tuple[Calibration, ...]:
    path = own_file()
    try:
        return read_entries(path.read_text(encoding="utf-8"), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"the calibrations in {str(path)!r} cannot be read: {error}") from None
    except TargetError as error:
        raise TargetError(f"{error}; repair the file, or delete it and run `foreplan devices --calibrate`") from None


def calibrations() -> Table:
    """What comes with foreplan, and behind it, so that it comes before, what the user has measured.

    Raises:
        TargetError: the user's file cannot be read or is broken.
    """
    table = _packaged()
    return Table(table.assumed, (*table.calibrated, *_own()))


def writable_file() -> Path:
    """The user's file, in a folder that is there.

    Raises:
        UsageError: it cannot be written.
    """
    path = own_file()
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
    """Write a calibration into the user's file, in the place of one of the same card and versions; returns the file.

    Raises:
        TargetError: there is such a file, and it is broken; it is as it was.
        UsageError, SessionError: the file cannot be written; it is as it was.
    """
    same = (found.card, found.versions)
    entries = [*(each for each in _own() if (each.card, each.versions) != same), found]
    path = writable_file()
    write_atomically(path, "\n".join([_HEAD, *(each.as_toml() for each in entries)]))
    return path
