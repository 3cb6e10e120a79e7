"""Options of a step from a TOML file: its keys are the fields of `Options`, and in [model] those of `Settings`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from foreplan.base.arguments import path_of, shown
from foreplan.base.calibration import read_toml
from foreplan.base.errors import TargetError, UsageError
from foreplan.base.files import confined
from foreplan.base.untrusted import contents
from foreplan.cli.settings import OF_MODEL, OF_STEP
from foreplan.options.fields import info_of

TABLE = "model"  # of what the command line adds to `Options`
_IN_TABLE = {name: each for name, each in OF_MODEL.items() if info_of(each).in_files}


def read_config(path: str) -> dict[str, Any]:
    """The options that a file gives, by name. Nobody has to trust the file: it names files in its own folder or below
    alone, and cannot say what else is trusted.

    Raises:
        UsageError: it cannot be read, or is no such file; names the key, and what is expected.
    """
    path = path_of("--config", path)
    try:
        text = contents(path, "TOML").decode()
    except OSError as error:
        raise UsageError(f"cannot read {path!r}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path!r} is no TOML file: it is not UTF-8 at byte {error.start}") from None
    try:
        found = read_toml(text, f"{path!r} is no TOML file")
    except TargetError as error:
        raise UsageError(str(error)) from None
    table = found.pop(TABLE, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path!r}: {TABLE} is a table, [{TABLE}], and is {shown(table)}")
    return _taken(path, "", found, OF_STEP) | _taken(path, TABLE, table, _IN_TABLE)


def _taken(path: str, table: str, found: Mapping[str, Any], known: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """The values of a table, each as its field takes it."""
    folder, where = os.path.dirname(path) or ".", f"{path!r}, [{table}]" if table else repr(path)

    def place(name: str) -> str:
        return str(confined(folder, name))

    taken = {}
    for name, value in found.items():
        if name not in known:
            raise UsageError(f"{where}: there is no key {name!r:.60}{_meant(name, table, known)}")
        info = info_of(known[name])
        try:
            taken[name] = info.kept(name, info.files(value, place) if info.files is not None else value)
        except UsageError as error:
            told = str(error)
            raise UsageError(f"{where}: {told if told.startswith(name) else f'{name}: {told}'}") from None
        except ValueError as error:
            raise UsageError(f"{where}: {name}: {error}; files that it names lie there or in folders below") from None
    return taken


def _meant(name: str, table: str, known: Mapping[str, Field[Any]]) -> str:
    """What a key is that is not known here."""
    if not table and name in _IN_TABLE:
        return f": it stands in the table [{TABLE}]"
    if table and name in OF_STEP:
        return f": it stands at the beginning, before [{table}]"
    if name in OF_MODEL:
        return f": a file cannot say it; give {info_of(OF_MODEL[name]).flag}"
    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {near[0]}?)" if near else f"; keys are {', '.join(known)}"
