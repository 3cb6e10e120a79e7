"""What the page of a memory map draws: one JSON object, whose columns of numbers are typed arrays in base64.

    texts      the parts of all names, each once: `layer1`, `.0`, `/conv`
    tree       all names as one tree: a node's name is its parent's with its own text behind it; node 0 is the root
    plans      one plan, or two that lie over one another; buffers and instructions are columns, and name nodes
    notes      lines for people, which the page shows beside the map

A column is `TYPE:BASE64`, little-endian; TYPE is one of u1, u2, u4, i4, f8.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from foreplan.base.units import align_up, format_bytes
from foreplan.planner.memory.bounds import granularities
from foreplan.planner.problem import Category
from foreplan.report.memory import Memory, on_card
from foreplan.report.timeline import Phase, Timeline, aligned

_TYPES = (("u1", 0, 2**8), ("u2", 0, 2**16), ("u4", 0, 2**32), ("i4", -(2**31), 2**31))
_PARTS = re.compile(r"(?<=[^./])(?=[./])")


def map_data(memories: Sequence[Memory], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The data of a page.

    Args:
        memories: of one plan, or of two that lie over one another; the first gives the axis of instructions.
        notes: shown beside the map, a paragraph each.
    """
    names, shapes = _Tree(), _Texts()
    lines = [Timeline.of(memory.problem, memory.plan) for memory in memories]
    plans = [_plan(memory, line, names, shapes) for memory, line in zip(memories, lines)]
    for plan, line in zip(plans[1:], lines[1:]):
        plan["steps"]["place"] = _column(aligned(lines[0].names, line.names))
    return {
        "texts": names.texts.texts,
        "tree": {"text": _column(names.text), "parent": _column(names.parent)},
        "shapes": shapes.texts,
        "categories": [str(category) for category in Category],
        "phases": [str(phase) for phase in Phase],
        "notes": list(notes),
        "plans": plans,
    }


def _plan(memory: Memory, line: Timeline, names: _Tree, shapes: _Texts) -> dict[str, Any]:
    problem, plan = memory.problem, memory.plan
    bases, top = stack(memory)
    phases = {phase: i for i, phase in enumerate(Phase)}
    return {
        "label": _label(memory),
        "regions": [region.name for region in problem.regions],
        "counted": [int(region.on_device) for region in problem.regions],
        "heights": list(plan.heights),
        "grain": list(granularities(problem)),
        "base": bases,
        "top": top,
        "arena": memory.arena,
        "budget": None if on_card(memory) else plan.budget,  # one of a card holds for more than the arena
        "peak": memory.peak_step,
        "steps": {
            "name": _column([names.node(name) for name in line.names]),
            "phase": _column([phases[phase] for phase in line.phases]),
            "time": _column(line.edges) if line.nanoseconds else None,
        },
        "buffers": _buffers(memory, names, shapes),
    }


def _buffers(memory: Memory, names: _Tree, shapes: _Texts) -> dict[str, str]:
    """Columns, one entry a buffer; `readers` holds those of all buffers, and `read` where each one's end."""
    found = memory.buffers
    categories = {category: i for i, category in enumerate(Category)}
    regions = {region.name: i for i, region in enumerate(memory.problem.regions)}
    columns: dict[str, list[int]] = {
        "name": [names.node(b.name) for b in found],
        "shape": [shapes.index(b.shape) for b in found],
        "category": [categories[b.category] for b in found],
        "region": [regions[b.region] for b in found],
        "thing": [memory.things.get(b.value, b.value) for b in found],  # what is recomputed or copied is one thing
        "written": [b.written for b in found],
        "readers": [step for b in found for step in b.readers],
        "read": list(accumulate(len(b.readers) for b in found)),
    }
    for name in ("offset", "nbytes", "lower", "upper"):
        columns[name] = [getattr(b, name) for b in found]
    return {name: _column(column) for name, column in columns.items()}


def _label(memory: Memory) -> str:
    """The model, its target and its budget, as far as they are known."""
    model, target = getattr(memory.problem, "model", ""), getattr(memory.problem, "target", "")
    budget = "" if memory.plan.budget is None else f"budget {format_bytes(memory.plan.budget)}"
    return ", ".join(filter(None, (model, target, budget))) or "plan"


def stack(memory: Memory) -> tuple[list[int], int]:
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


def _column(numbers: Sequence[int] | np.ndarray) -> str:
    """Numbers in the narrowest type that holds them exactly."""
    array = np.asarray(numbers)
    least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
    whole = array.dtype.kind in "iu" or not array.size
    kind = next((kind for kind, low, high in _TYPES if whole and low <= least and most < high), "f8")
    return f"{kind}:{base64.b64encode(array.astype(f'<{kind}').tobytes()).decode()}"


class _Texts:
    """Texts by the order of their first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


class _Tree:
    """Names as a tree of their parts, which begin at a `.` or `/`, as scopes do (see `foreplan.base.patterns`)."""

    def __init__(self) -> None:
        self.texts = _Texts()
        self.text, self.parent = [self.texts.index("")], [0]
        self._nodes: dict[tuple[int, int], int] = {}

    def node(self, name: str) -> int:
        """The node of a name; its parts are added where they are new."""
        at = 0
        for part in _PARTS.split(name):
            key = (at, self.texts.index(part))
            if key not in self._nodes:
                self._nodes[key] = len(self.parent)
                self.parent.append(at)
                self.text.append(key[1])
            at = self._nodes[key]
        return at
