"""The memory map: one HTML file that shows every buffer over time and offset, and needs nothing but a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from foreplan.base.units import format_bytes
from foreplan.report.memory import Memory
from foreplan.views.memory_map_data import map_data

_MEANINGS = {
    "Arena": "The one block of memory that holds all that the step keeps or makes",
    "Alive at the peak": "The bytes of all buffers that are alive at the instruction where most are",
    "Budget": "The memory that the plan was asked to stay within",
    "Lower bound of this schedule": "No placement needs less for these instructions in this order",
    "Lower bound in any order": "No schedule needs less, whatever it computes again; perhaps all need more",
    "Persistent": "Parameters, statistics, the optimizer's state and constants",
    "Largest workspace": "Scratch memory that one kernel uses while it runs",
    "Host memory": "Activations wait there, and leave room on the device",
}
_SCRIPTS = ("data", "", "bands", "panels", "input")  # one program, in this order


def map_html(memories: Sequence[Memory], title: str = "Memory map", notes: Sequence[str] = ()) -> str:
    """The memory map as one self-contained page; equal arguments give equal text.

    x is the instruction or predicted time, y the offset, and each buffer is a rectangle; regions are stacked in their
    own order, with host memory above the device's. Over it are bands of the step's phases and of the model's modules.
    The page loads nothing from elsewhere.

    Args:
        memories: of one plan; or of two, which then lie over one another.
        notes: for people about the first plan, shown beside the map.
    """
    folder = files("foreplan.views")
    names = [f"memory_map{'_' if part else ''}{part}.js" for part in _SCRIPTS]
    script = "".join((folder / name).read_text("utf-8") for name in names)
    pieces = {
        "css": (folder / "memory_map.css").read_text("utf-8"),
        # Only the script with this digest may run: a name that slipped through the escaping could still do nothing.
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "js": script,
        "title": html.escape(title),
        "subtitle": _subtitle(memories[0]) if len(memories) == 1 else "",
        "figures": "".join((_subtitle(each) if len(memories) > 1 else "") + _figures(each) for each in memories),
        "data": _for_script(map_data(memories, notes)),
    }
    page = (folder / "memory_map.html").read_text("utf-8")
    # One pass from left to right: what a piece contains is never taken for a placeholder.
    parts = page.split("{{")
    return parts[0] + "".join(pieces[part.partition("}}")[0]] + part.partition("}}")[2] for part in parts[1:])


def _for_script(data: dict[str, Any]) -> str:
    """JSON that no HTML parser can mistake for markup: the data sits inside a script element."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII only, so line separators are escaped already
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _subtitle(memory: Memory) -> str:
    """What was planned. The page says before it which of two plans lies in front."""
    model, target = getattr(memory.problem, "model", ""), getattr(memory.problem, "target", "")
    budget = "" if memory.plan.budget is None else f"budget {format_bytes(memory.plan.budget)}"
    parts = [model, f"target {target}" if target else "", budget]
    parts += [f"{len(memory.plan.steps):,} instructions", f"{len(memory.buffers):,} buffers"]
    told = html.escape(" · ".join(part for part in parts if part))
    return f'<p class="subtitle"><b class="front"></b>{told}</p>'


def key_figures(memory: Memory) -> list[tuple[str, str, str]]:
    """The numbers that matter most, for people: what, how much, and a remark."""
    gap = memory.arena - memory.lower_bound
    reached = "reached" if gap == 0 else f"{gap / max(1, memory.lower_bound):.2%} below the arena"
    figures = [
        ("Arena", memory.arena, f"{memory.arena:,} bytes"),
        ("Lower bound of this schedule", memory.lower_bound, reached),
        ("Persistent", memory.persistent, "kept from step to step"),
        ("Largest workspace", memory.workspace, "of one instruction"),
    ]
    if memory.order_lower_bound is not None:
        figures.insert(2, ("Lower bound in any order", memory.order_lower_bound, "proven; perhaps out of reach"))
    if memory.host:
        figures.append(("Host memory", memory.host, "for what is copied there and back"))
    if memory.plan.budget is not None:
        figures.insert(1, ("Budget", memory.plan.budget, "asked for"))
    peak = f"instruction {memory.peak_step}: {memory.action_at(memory.peak_step)}"
    alive = sum(memory.categories.values())
    cells = [(name, format_bytes(nbytes), note) for name, nbytes, note in figures]
    cells.insert(1, ("Alive at the peak", format_bytes(alive), peak))
    return cells


def _figures(memory: Memory) -> str:
    cells = [tuple(map(html.escape, (*cell, _MEANINGS[cell[0]]))) for cell in key_figures(memory)]
    shown = "".join(
        f'<div title="{meaning}"><dt>{name}</dt><dd>{size}</dd><dd title="{note}">{note}</dd></div>'
        for name, size, note, meaning in cells
    )
    return f'<dl class="figures">{shown}</dl>'
