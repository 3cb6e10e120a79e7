"""Writes docs/ops.md: every op, from its declaration."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import foreplan.ops  # noqa: F401  (registers every op)
from foreplan.graph import Op
from foreplan.graph.registry import registered_ops

PATH = Path(__file__).with_name("ops.md")


def marks(cls: type[Op]) -> str:
    """What the op states beyond the necessary."""
    found = []
    if cls.is_view:
        found.append("view")
    if cls.vjp is not Op.vjp:
        found.append("differentiable")
    if cls.overwrites is not Op.overwrites:
        found.append("in place")
    if cls.workspace is not Op.workspace:
        found.append("workspace")
    if cls.for_training is not Op.for_training:
        found.append("training form")
    if cls.compute is Op.compute:
        found.append("decomposed")
    return ", ".join(found)


def attributes(cls: type[Op]) -> str:
    """Field names with their defaults."""
    shown = []
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else f"={field.default!r}"
        shown.append(f"`{field.name}{default}`")
    return ", ".join(shown)


def text() -> str:
    """The whole page."""
    lines = [
        "# Ops",
        "",
        "Made from the declarations by `python docs/make_ops.py`. *in place*: an output may take an input's bytes;",
        "*workspace*: the NumPy kernel needs scratch memory; *decomposed*: run by simpler ops.",
        "",
    ]
    module = ""
    for name, cls in sorted(registered_ops().items(), key=lambda item: (item[1].__module__, item[0])):
        if cls.__module__ != module:
            module = cls.__module__
            doc = (inspect.getdoc(inspect.getmodule(cls)) or "").split("\n\n")[0].replace("\n", " ")
            lines += [
                "",
                f"## {module.removeprefix('foreplan.ops.').removesuffix('.ops').replace('.', '/')}",
                "",
                doc,
                "",
                "| op | attributes | what | |",
                "|---|---|---|---|",
            ]
        doc = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| `{name}` | {attributes(cls)} | {doc} | {marks(cls)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
