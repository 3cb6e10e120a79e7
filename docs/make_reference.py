"""Writes docs/reference/: every public name, from its docstring and signature, as `help()` has them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).with_name("reference")
# By page: its title, the module, and what it begins with.
PAGES = {
    "foreplan": (
        "foreplan",
        "foreplan",
        "`import foreplan as fp`. Errors have a page of their own: [errors](errors.md).",
    ),
    "session": ("Steps and sessions", "", "What `fp.compile` returns, what that gives, and what a step returns."),
    "nn": ("foreplan.nn", "foreplan.frontend.nn", "Layers and functions for models that `fp.trace` reads."),
    "losses": ("foreplan.losses", "foreplan.frontend.losses", "See also [optimizing.md](../optimizing.md#losses)."),
    "optim": (
        "foreplan.optim",
        "foreplan.passes.optimizer",
        "Optimizers and learning-rate schedules. See also [optimizing.md](../optimizing.md#optimizers).",
    ),
    "metrics": ("foreplan.metrics", "foreplan.frontend.metrics", "What `fp.evaluation` measures."),
    "models": ("foreplan.models", "foreplan.models", "The zoo. See also [zoo.md](../zoo.md)."),
    "planner": (
        "foreplan.planner",
        "foreplan.planner",
        "`from foreplan import planner`. It needs numpy and llvmlite alone. See also "
        "[The planner in your own framework](../your-own-framework.md).",
    ),
    "command-line": (
        "The command line",
        "",
        "Commands that make a step of a MODEL share the options of a step; [options.md](../options.md) is about\n"
        "files of them. Results go to standard output, progress to standard error. Exit codes: 0 fine, 1 a check\n"
        "failed, 2 wrong use, 3 does not fit.",
    ),
    "errors": ("foreplan.errors", "foreplan.base.errors", "Every error that is raised for a person to read."),
}
SESSION = ("foreplan.compiler.compiled:Compiled", "foreplan.runtime.session:Session", "foreplan.runtime.result:Result")
SESSION += ("foreplan.graph:Graph", "foreplan.report.memory:Memory")
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|References):")
WITH_METHODS = ("session", "planner")
WIDE = 100  # letters of a signature in one line


class _Text(str):
    """What is shown as it is, without quotes: an annotation, a default."""

    __repr__ = str.__str__


def entries(page: str) -> Iterator[tuple[str, Any]]:
    """The names of a page with what they are, in order."""
    if page == "session":
        for place in SESSION:
            module, _, name = place.partition(":")
            yield name, getattr(importlib.import_module(module), name)
        return
    module = importlib.import_module(PAGES[page][1])
    for name in getattr(module, "__all__", None) or sorted(vars(module)):
        found = getattr(module, name)
        if name[0] != "_" and name != "Compiled" and _belongs(found, page):
            yield name, found


def _belongs(found: Any, page: str) -> bool:
    """Whether a page shows this: errors have a page of their own, and so have modules that cannot be called."""
    if isinstance(found, type) and issubclass(found, Exception):
        return page == "errors" and found.__module__ == "foreplan.base.errors"
    return page != "errors" and (callable(found) or not isinstance(found, ModuleType))


def signature(name: str, found: Any) -> str:
    """How it is called, on several lines where it is long."""
    try:
        told = inspect.signature(found)
    except ValueError:
        return ""
    parts, slash, star = [], False, False
    for each in told.parameters.values():
        if each.name == "self":
            continue
        text = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + each.name
        if each.annotation is not each.empty:
            text += f": {_annotation(each.annotation)}"
        if each.default is not each.empty:
            text += f" = {_default(each.default)}"
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        slash = slash or each.kind is each.POSITIONAL_ONLY
        parts.append(text)
    gives = "" if told.return_annotation in (told.empty, "None", None) else f" -> {_annotation(told.return_annotation)}"
    line = f"{name}({', '.join(parts)}){gives}"
    return line if len(line) <= WIDE else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){gives}"


def _annotation(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def _default(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__name__
    shown = repr(value)
    return "…" if " at 0x" in shown or len(shown) > 60 else shown


def prose(text: str) -> list[str]:
    """A docstring as Markdown: sections become lists, and everything else stays as it is."""
    plain, out, heading = text.splitlines(), [], ""
    for number, (raw, line) in enumerate(zip(plain, _escaped(text).splitlines())):
        if SECTION.fullmatch(raw):
            heading = raw[:-1].replace("Args", "Arguments")
            out += ["", f"**{heading}**", ""]
            continue
        if heading and not raw.startswith("    "):
            heading = heading if not raw and "".join(plain[number + 1 : number + 2]).startswith("    ") else ""
        if heading in ("Arguments", "Attributes", "Raises"):
            out.append(_item(raw, line))
        elif heading:
            out.append(line.strip())
        else:
            out.append(raw if raw.startswith("    ") else line)
    return out


def _item(raw: str, line: str) -> str:
    """A line of a section: `name: meaning`, or more of the meaning."""
    name, colon, meaning = line.strip().partition(":")
    if raw.startswith("     ") or not colon:
        return f"    {line.strip()}"
    return f"- {', '.join(f'`{each.strip()}`' for each in name.split(','))}:{meaning}"


def _escaped(text: str) -> str:
    """Stars, angles and brackets that Markdown would take for its own; what stands in backticks stays."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece[:1] == "`" else re.sub(r"([*<\[\]|])", r"\\\1", piece) for piece in pieces)


def members(found: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that a class of foreplan's states, with docstrings; those of its bases first."""
    seen = set()
    for base in reversed(found.__mro__):
        if base.__module__.partition(".")[0] == "foreplan":
            for name, member in vars(base).items():
                plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                kept = inspect.isfunction(plain) or isinstance(plain, property) or hasattr(plain, "attrname")
                if name[0] != "_" and kept and name not in seen and inspect.getdoc(plain):
                    seen.add(name)
                    yield name, plain


def entry(name: str, found: Any, whole: bool) -> list[str]:
    """The part of a page about one name; the whole of a class has its methods."""
    lines = ["", f"## {name}", ""]
    if isinstance(found, type) and issubclass(found, Exception):
        lines += [f"A kind of `{found.__mro__[1].__name__}`.", ""]
    elif isinstance(found, type) and issubclass(found, Enum):
        lines += ["One of " + ", ".join(f"`{each.name}`" for each in found) + ".", ""]
    elif callable(found) and (isinstance(found, type) or inspect.isroutine(found) or isinstance(found, ModuleType)):
        lines += ["```python", signature(name, found), "```", ""]
    elif type(found).__module__.partition(".")[0] == "foreplan":
        return [*lines, f"`{type(found).__name__}` with its defaults."]
    else:
        return [*lines, f"`{found!r}`"]
    lines += prose(inspect.getdoc(found) or "")
    for member, what in members(found) if whole and isinstance(found, type) and not issubclass(found, Enum) else ():
        if isinstance(what, property) or not inspect.isfunction(what):
            lines += ["", f"### {name}.{member}", ""]
        else:
            lines += ["", f"### {name}.{member}()", "", "```python", signature(member, what), "```", ""]
        lines += prose(inspect.getdoc(what) or "")
    return lines


def command_line() -> list[str]:
    """The options of a step in their groups, and each command with what it has besides."""
    from foreplan.cli import cli
    from foreplan.cli.config import TABLE
    from foreplan.cli.flags import Flag, in_groups
    from foreplan.cli.settings import OF_STEP
    from foreplan.options.fields import info_of

    lines = [
        "",
        "## Options of a step",
        "",
        f"The key of an option in a file stands behind [{TABLE}] where it says so.",
    ]
    shared = in_groups(each for each in cli.commands["estimate"].params if isinstance(each, Flag))
    for group, listed in shared.items():
        lines += ["", f"### {group}", "", "| flag | key | |", "|---|---|---|"]
        for each in listed:
            key = f"`{each.name}`" if each.name in OF_STEP else f"[{TABLE}] `{each.name}`"
            lines.append(f"| {_row(each, key if info_of(each.field).in_files else '')}")
    for name, command in sorted(cli.commands.items()):
        lines += ["", f"## foreplan {name}", ""]
        for part in inspect.cleandoc(command.help or "").split("\n\n"):
            shown = part.removeprefix("\b\n")
            lines += [_escaped(part) if shown == part else _indented(shown), ""]
        if any(isinstance(each, Flag) for each in command.params):
            own = [
                f"`{each.opts[0]}`"
                for each in command.params
                if isinstance(each, Flag) and info_of(each.field).in_files
            ]
            whole = len(own) > 9
            lines += [f"Options of a step: {'all' if whole else ', '.join(own) or 'those of a plan file'}.", ""]
        lines += ["| flag | |", "|---|---|"]
        for listed in in_groups(each for each in command.params if not isinstance(each, Flag)).values():
            lines += [f"| {_row(each)}" for each in listed]
    return lines


def _row(option: Any, *cells: str) -> str:
    """The rest of a line about a flag: its names with its value, cells, and what it means."""
    value = "" if option.is_flag else f" {option.metavar or '|'.join(getattr(option.type, 'choices', ['N']))}"
    usual = f" By default {option.default}." if option.show_default and option.default is not None else ""
    names = f"{', '.join(option.opts)}{value}".replace("|", "\\|")
    return " | ".join((f"`{names}`", *cells, f"{_escaped(option.help or '')}{usual} |"))


def _indented(text: str) -> str:
    first, *rest = text.splitlines()
    if not first.startswith("  "):
        return "\n".join((first, "", *(f"    {line.strip()}" for line in rest)))
    return "\n".join(f"    {line.strip()}" for line in text.splitlines())


def text(page: str) -> str:
    """A whole page."""
    title, _, begin = PAGES[page]
    lines = [f"# {title}", "", begin, "", "Made from docstrings by `python docs/make_reference.py`."]
    if page == "command-line":
        lines += command_line()
    for name, found in () if page == "command-line" else entries(page):
        lines += entry(name, found, page in WITH_METHODS)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        (FOLDER / f"{page}.md").write_text(text(page))
