"""The memory map: one HTML file that shows every buffer over time and offset, and needs nothing but a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from importlib.resources import files
from typing import Any

from foreplan.files import write_atomically
from foreplan.planner.memory.bounds import granularities
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Category, Problem
from foreplan.units import align_up, format_bytes
from foreplan.views.memory import Memory, on_card


def write_map(path: str | os.PathLike[str], problem: Problem, plan: Plan, title: str = "Memory map") -> None:
    """Write the memory map of a plan to one self-contained HTML file.

    x is the instruction, y the offset, and each buffer is a rectangle; regions are stacked in their own order, with
    host memory above the device's. The page loads nothing from elsewhere.

    Raises:
        ForeplanError: the file cannot be written; see `write_atomically`.
    """
    write_atomically(path, map_html(problem, plan, title))


def map_html(problem: Problem, plan: Plan, title: str = "Memory map") -> str:
    """The page itself; equal arguments give equal text."""
    memory = Memory(problem, plan)
    folder = files("foreplan.views")
    script = "".join((folder / name).read_text("utf-8") for name in ("memory_map.js", "memory_map_input.js"))
    pieces = {
        "css": (folder / "memory_map.css").read_text("utf-8"),
        # Only the script with this digest may run: a name that slipped through the escaping could still do nothing.
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "js": script,
        "title": html.escape(title),
        "subtitle": html.escape(_subtitle(memory)),
        "figures": _figures(memory),
        "data": _for_script(map_data(memory)),
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
    model, target = getattr(memory.problem, "model", ""), getattr(memory.problem, "target", "")
    parts = [model, f"target {target}" if target else ""]
    parts += [f"{len(memory.plan.steps):,} instructions", f"{len(memory.buffers):,} buffers"]
    return " · ".join(part for part in parts if part)


def _figures(memory: Memory) -> str:
    gap = memory.arena - memory.lower_bound
    reached = "reached" if gap == 0 else f"{gap / max(1, memory.lower_bound):.2%} below the arena"
    figures = [
        ("Arena", memory.arena, f"{memory.arena:,} bytes"),
        ("Lower bound of this schedule", memory.lower_bound, reached),
        ("Persistent", memory.persistent, "kept from step to step"),
        ("Largest workspace", memory.workspace, "of one instruction"),
    ]
    if memory.order_lower_bound is not None:
        figures.insert(2, ("Lower bound in any order", memory.order_lower_bound, "proven over all schedules"))
    if memory.host:
        figures.append(("Host memory", memory.host, "for what is copied there and back"))
    if memory.plan.budget is not None:
        figures.insert(1, ("Budget", memory.plan.budget, "asked for"))
    peak = f"instruction {memory.peak_step}: {memory.action_at(memory.peak_step)}"
    alive = sum(memory.categories.values())
    cells = [(name, format_bytes(nbytes), note) for name, nbytes, note in figures]
    cells.insert(1, ("Alive at the peak", format_bytes(alive), peak))
    return "".join(_figure(html.escape(name), number, html.escape(note)) for name, number, note in cells)


def _figure(name: str, number: str, note: str) -> str:
    return f'<div><dt>{name}</dt><dd>{number}</dd><dd title="{note}">{note}</dd></div>'


def map_data(memory: Memory) -> dict[str, Any]:
    """What the page draws, as columns; every name is written once and referred to by index."""
    problem, plan = memory.problem, memory.plan
    names = _Names()
    shapes, producers = _Names(), _Names()
    regions = [region.name for region in problem.regions]
    bases, top = _stack(memory)
    categories = list(Category)
    data: dict[str, Any] = {
        "steps": [problem.actions[step.action].name for step in plan.steps],
        "regions": regions,
        "heights": list(plan.heights),
        "grain": list(granularities(problem)),
        "base": bases,
        "top": top,
        "arena": memory.arena,
        "budget": None if on_card(memory) else plan.budget,  # one of a card holds for more than the arena
        "peak": memory.peak_step,
        "categories": [str(category) for category in categories],
    }
    found = memory.buffers
    data["nameOf"] = [names.index(b.name) for b in found]
    data["shapeOf"] = [shapes.index(b.shape) for b in found]
    data["producer"] = [producers.index(b.producer) if b.producer else -1 for b in found]
    data["name"], data["shape"], data["producers"] = names.texts, shapes.texts, producers.texts
    data["category"] = [categories.index(b.category) for b in found]
    data["region"] = [regions.index(b.region) for b in found]
    data["counted"] = [int(b.on_device) for b in found]
    for column in ("offset", "nbytes", "lower", "upper"):
        data[column] = [getattr(b, column) for b in found]
    return data


def _stack(memory: Memory) -> tuple[list[int], int]:
    """Where each region begins on the map, and where the last one ends: the device's first, the host's above."""
    regions, heights = memory.problem.regions, memory.plan.heights
    bases, top = [0] * len(regions), 0
    for on_device in (True, False):
        if not on_device and top and any(h for r, h in zip(regions, heights) if not r.on_device):
            top = align_up(top + top // 16, 64)  # a strip of free space sets host memory apart
        for i, region in enumerate(regions):
            if region.on_device is on_device:
                bases[i] = top
                top += heights[i]
    return bases, top


class _Names:
    """Texts by the order of their first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]
