"""A plan as a profile in predicted or measured time: traces for Perfetto and Chrome, and profiles for speedscope.

Sources: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU;
speedscope's file format, https://www.speedscope.app/file-format-schema.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from foreplan.base.patterns import scopes_of
from foreplan.report.memory import Memory, printable
from foreplan.report.timeline import Timeline
from foreplan.version import VERSION

_PROCESS = {"pid": 1}
_INSTRUCTIONS, _MODULES = 2, 3  # viewers take a thread with the number of its process for the main one


def trace_text(memory: Memory, title: str, nanoseconds: Sequence[int] | None = None) -> str:
    """A trace: instructions as slices, modules as nested slices, live bytes by category as a counter, and an arrow from
    each writing of a value to the next one where it has several lives.

    Where the target predicts no time, each instruction takes a microsecond, and the trace says so.

    Args:
        nanoseconds: measured, of each instruction; by default predicted times stand.
    """
    line = Timeline.of(memory.problem, memory.plan, nanoseconds)
    edges, clock = line.clock
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": printable(title)}} | _PROCESS,
        *(
            {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}} | _PROCESS
            for thread, name in ((_INSTRUCTIONS, "instructions"), (_MODULES, "modules"))
        ),
        *_instructions(memory, line, edges),
        *_modules(line, edges),
        *_counters(memory, edges),
        *_lives(memory, edges),
    ]
    told = {"producer": f"foreplan {VERSION}", "clock": clock, "arena_bytes": memory.arena}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": told}, separators=(",", ":")) + "\n"


def _instructions(memory: Memory, line: Timeline, edges: np.ndarray) -> Iterator[dict[str, Any]]:
    for i, (step, phase) in enumerate(zip(memory.plan.steps, line.phases)):
        action = memory.problem.actions[step.action]
        args = {
            "instruction": i,
            "phase": phase,
            "flops": action.flops,
            "bytes_moved": action.nbytes,
            "workspace_bytes": action.workspace,
            "live_bytes": int(memory.live[i]),
        }
        begin, end = int(edges[i]) / 1000, int(edges[i + 1]) / 1000
        lasts = end - begin
        while begin + lasts > end:  # rounded up, it would hold what begins when it ends
            lasts = math.nextafter(lasts, 0)
        named = {"ph": "X", "name": printable(action.name), "cat": phase, "tid": _INSTRUCTIONS}
        yield named | {"ts": begin, "dur": lasts, "args": args} | _PROCESS


def _modules(line: Timeline, edges: np.ndarray) -> Iterator[dict[str, Any]]:
    """Beginnings and ends, outer modules around inner ones."""
    running: list[str] = []
    for name, edge in zip((*line.names, ""), edges.tolist()):
        scopes = list(scopes_of(name))[:-1]
        same = _common(running, scopes)
        at = {"tid": _MODULES, "ts": edge / 1000, "cat": "module"} | _PROCESS
        yield from ({"ph": "E", "name": printable(scope)} | at for scope in reversed(running[same:]))
        yield from ({"ph": "B", "name": printable(scope)} | at for scope in scopes[same:])
        running = scopes


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    """How many entries are the same at the beginning of both."""
    different = (i for i, (a, b) in enumerate(zip(first, second)) if a != b)
    return next(different, min(len(first), len(second)))


def _counters(memory: Memory, edges: np.ndarray) -> Iterator[dict[str, Any]]:
    """Perfetto draws a row for each pair of a counter and a key, and calls it by both."""
    shown = {category: series for category, series in memory.series.items() if series.any()}
    for i in range(len(edges) - 1):
        parts = {category.replace("_", " "): int(series[i]) for category, series in shown.items()}
        counters = {"arena": {"bytes": memory.arena}, "live": {"bytes": int(memory.live[i])}, "live bytes of": parts}
        for name, args in counters.items():
            yield {"ph": "C", "name": name, "ts": int(edges[i]) / 1000, "args": args} | _PROCESS


def _lives(memory: Memory, edges: np.ndarray) -> Iterator[dict[str, Any]]:
    written: dict[int, list[int]] = {}
    for b in memory.buffers:
        if b.value >= 0 and b.written >= 0:
            written.setdefault(memory.things.get(b.value, b.value), []).append(b.written)
    count = 0
    for value, steps in written.items():
        for pair in pairwise(steps):
            count += 1
            for way, step in zip("sf", pair):
                more = {"bp": "e"} if way == "f" else {}
                middle = (int(edges[step]) + int(edges[step + 1])) / 2000
                name = printable(memory.problem.values[value].name)
                same = {"name": name, "cat": "lives", "id": count, "tid": _INSTRUCTIONS}
                yield {"ph": way, "ts": middle} | same | _PROCESS | more


def speedscope_text(memory: Memory, title: str) -> str:
    """Two profiles over the modules: predicted time from first to last, and the bytes alive at the peak."""
    line = Timeline.of(memory.problem, memory.plan)
    edges, clock = line.clock
    frames = _Frames()
    alive = [b for b in memory.at(memory.peak_step) if b.on_device]
    ends = {"startValue": 0, "endValue": int(edges[-1])}
    profiles = [
        {"type": "evented", "name": clock, "unit": "nanoseconds", **ends, "events": list(_calls(line, edges, frames))},
        {
            "type": "sampled",
            "name": f"bytes alive at the peak, instruction {memory.peak_step}",
            "unit": "bytes",
            "startValue": 0,
            "endValue": sum(b.nbytes for b in alive),
            "samples": [frames.stack(b.name) for b in alive],
            "weights": [b.nbytes for b in alive],
        },
    ]
    whole = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": printable(title),
        "exporter": f"foreplan {VERSION}",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames.names]},
        "profiles": profiles,
    }
    return json.dumps(whole, separators=(",", ":")) + "\n"


def _calls(line: Timeline, edges: np.ndarray, frames: _Frames) -> Iterator[dict[str, Any]]:
    """Each instruction is a call within those of its modules."""
    running: list[int] = []
    for name, begin in zip((*line.names, None), edges.tolist()):
        stack = [] if name is None else frames.stack(name)
        same = min(_common(running, stack), max(0, len(stack) - 1))  # an action that runs twice is called twice
        for frame in reversed(running[same:]):
            yield {"type": "C", "frame": frame, "at": begin}
        for frame in stack[same:]:
            yield {"type": "O", "frame": frame, "at": begin}
        running = stack


class _Frames:
    """The frames of a profile: scopes, each under its whole name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._index: dict[str, int] = {}

    def stack(self, name: str) -> list[int]:
        """The scopes of a name, outer ones first."""
        return [self._frame(printable(scope)) for scope in scopes_of(name)]

    def _frame(self, name: str) -> int:
        if name not in self._index:
            self._index[name] = len(self.names)
            self.names.append(name)
        return self._index[name]
