"""What a plan can be written as: one table, by the ending of the file's name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreplan.base.arguments import choice
from foreplan.base.errors import UsageError
from foreplan.base.files import check_writable, write_atomically
from foreplan.base.units import listed
from foreplan.report.memory import Memory
from foreplan.views.digraph import graphml_text, plan_digraph, plan_dot_text
from foreplan.views.memory_map import map_html
from foreplan.views.picture import svg_text
from foreplan.views.plan_onnx import plan_onnx
from foreplan.views.snapshot import plan_snapshot, snapshot_bytes
from foreplan.views.tables import csv_text
from foreplan.views.traces import speedscope_text, trace_text


@dataclass(frozen=True)
class Format:
    """One form of a plan.

    Attributes:
        name: for who chooses it by a word.
        ending: of the file's name.
        about: for people.
        write: memory, title → content.
    """

    name: str
    ending: str
    about: str
    write: Callable[[Memory, str], str | bytes]


PAGE = "html"
FORMATS = (
    Format(PAGE, ".html", "the memory map, a page that opens offline", lambda memory, title: map_html([memory], title)),
    Format("svg", ".svg", "the memory map as a picture", svg_text),
    Format("csv", ".csv", "one row per buffer: place, lifetime, readers", lambda memory, _: csv_text(memory)),
    Format(
        "trace", ".trace.json", "instructions and live bytes over predicted time, for Perfetto and Chrome", trace_text
    ),
    Format("speedscope", ".speedscope.json", "time and bytes by module, for speedscope", speedscope_text),
    Format("onnx", ".onnx", "instructions with offsets and lifetimes, for Netron", plan_onnx),
    Format(
        "graphml",
        ".graphml",
        "instructions and contents as a graph (needs networkx)",
        lambda m, _: graphml_text(plan_digraph(m)),
    ),
    Format(
        "snapshot",
        ".pickle",
        "allocations, for PyTorch's memory_viz page",
        lambda memory, title: snapshot_bytes(plan_snapshot(memory, title)),
    ),
    Format("dot", ".dot", "instructions and edges between them, for Graphviz", lambda memory, _: plan_dot_text(memory)),
)


def format_of(path: str | os.PathLike[str], format: str | None = None) -> Format:
    """The format that a file's name asks for, or that is chosen by a word.

    Raises:
        UsageError: there is no such word; or the name has none of the endings. Lists them.
    """
    if format is not None:
        chosen = choice("format", format, [each.name for each in FORMATS])
        return next(each for each in FORMATS if each.name == chosen)
    name = os.fspath(path).lower()
    for each in FORMATS:
        if name.endswith(each.ending):
            return each
    endings = listed([each.ending for each in FORMATS], len(FORMATS))
    raise UsageError(
        f"the name {os.fspath(path)!r} does not say what to write: let it end in {endings}, or choose a format"
    )


def write_view(
    path: str | os.PathLike[str],
    memory: Memory,
    title: str,
    over: Memory | None = None,
    notes: Sequence[str] = (),
    format: str | None = None,
) -> None:
    """Write a plan to a file, in the format that the file's name asks for.

    Args:
        over: of another plan, which lies over this one on the page.
        notes: for people, beside the map on the page.
        format: name of one, whatever the file's name is.

    Raises:
        UsageError: the name asks for no format, or for one that cannot show two plans; or the file cannot be written;
            or networkx is needed and not installed.
        SessionError: the bytes cannot be stored.
    """
    chosen = format_of(path, format)
    if over is not None and chosen.name != PAGE:
        raise UsageError("two plans lie over one another on a page only: write a page, as .html")
    check_writable(path)
    if chosen.name == PAGE:
        write_atomically(path, map_html([memory] if over is None else [memory, over], title, notes))
    else:
        write_atomically(path, chosen.write(memory, title))
