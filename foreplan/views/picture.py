"""The memory map as a picture without a script: SVG, for files and for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterator

import numpy as np

from foreplan.base.units import format_bytes
from foreplan.planner.problem import Category
from foreplan.report.memory import Memory, NamedBuffer, peak_text, printable
from foreplan.report.timeline import Phase, Timeline
from foreplan.views.memory_map import key_figures
from foreplan.views.memory_map_data import stack

COLOURS = {
    Category.PARAMETERS: "#3f78b5",
    Category.OPTIMIZER_STATE: "#8b5fb4",
    Category.GRADIENTS: "#e0702b",
    Category.ACTIVATIONS: "#3a9a63",
    Category.WORKSPACE: "#8a8f98",
    Category.COMMUNICATION: "#b0486a",
    Category.INPUTS: "#c9a21b",
    Category.OUTPUTS: "#1fa3b3",
}
PHASES = {
    Phase.FORWARD: "#4a8fd4",
    Phase.BACKWARD: "#e0702b",
    Phase.UPDATE: "#3a9a63",
    Phase.RECOMPUTE: "#c2379b",
    Phase.COPY: "#8b6f47",
}
_LEFT, _RIGHT, _UPPER, _LOWER, _LANE = 74, 12, 26, 40, 9
_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def svg_text(memory: Memory, title: str = "", width: int = 1400, height: int = 800, most: int | None = None) -> str:
    """The memory map as SVG: x is the instruction, y the offset; the strip above has the phases of the step.

    Args:
        title: above the picture.
        width, height: in pixels; text keeps its size.
        most: how many buffers to draw: those with the largest products of bytes and lifetime; None: all. A line below
            the picture says how many are left out.
    """
    return "".join(_Picture(memory, title, width, height, most).lines())


def notebook_html(memory: Memory, title: str) -> str:
    """What notebooks show of a step: its key numbers and a small picture, without a script."""
    cells = "".join(
        f'<td style="padding:2px 18px 2px 0;text-align:left"><small>{html.escape(name)}</small><br>'
        f"<b>{html.escape(size)}</b></td>"
        for name, size, _ in key_figures(memory)
    )
    picture = svg_text(memory, width=900, height=320, most=400)
    return (
        f"<div><b>{html.escape(printable(title))}</b><table><tr>{cells}</tr></table>"
        f"<p>{html.escape(printable(peak_text(memory)))}</p>{picture}</div>"
    )


class _Picture:
    def __init__(self, memory: Memory, title: str, width: int, height: int, most: int | None) -> None:
        self.memory, self.title, self.width, self.height = memory, title, width, height
        self.line = Timeline.of(memory.problem, memory.plan)
        self.steps = max(1, len(memory.plan.steps))
        bases, top = stack(memory)
        self.top = max(1, top)
        self.base = {region.name: base for region, base in zip(memory.problem.regions, bases)}
        self.lanes = [phase for phase in Phase if phase in self.line.phases]
        self.map_top = _UPPER + _LANE * len(self.lanes) + 6
        drawn = sorted(memory.buffers, key=lambda b: -b.nbytes * (b.upper - b.lower))[:most]
        self.left_out = len(memory.buffers) - len(drawn)
        self.drawn = sorted(drawn, key=lambda b: (b.lower, b.region, b.offset))

    def x(self, step: float) -> float:
        return _LEFT + step / self.steps * (self.width - _LEFT - _RIGHT)

    def y(self, byte: float) -> float:
        return self.height - _LOWER - byte / self.top * (self.height - _LOWER - self.map_top)

    def lines(self) -> Iterator[str]:
        memory = self.memory
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{_FONT}" font-size="12" role="img">\n'
            f"<title>{_escaped(self.title or 'Memory map')}</title>\n"
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>\n'
        )
        head = f"{self.title}: {peak_text(memory)}" if self.title else peak_text(memory)
        yield _text(_LEFT, 17, head, weight=600)
        yield from self._phases()
        yield from self._ticks()
        for buffer in self.drawn:
            yield self._buffer(buffer)
        arena = self.y(memory.arena)
        yield f'<path d="M{_LEFT} {arena:.1f}H{self.width - _RIGHT}" stroke="#14181f" fill="none"/>\n'
        yield _text(self.width - _RIGHT, 17, f"arena {format_bytes(memory.arena)}", "end", 600)
        peak = self.x(memory.peak_step + 0.5)
        yield f'<path d="M{peak:.1f} {self.map_top}V{self.height - _LOWER}" stroke="#b3001e" fill="none"/>\n'
        yield from self._legend()
        yield "</svg>\n"

    def _phases(self) -> Iterator[str]:
        for row, phase in enumerate(self.lanes):
            y = _UPPER + row * _LANE
            yield _text(_LEFT - 6, y + 7, phase, "end", size=9)
            here = np.array([0, *(each is phase for each in self.line.phases), 0], np.int8)
            starts, ends = (np.flatnonzero(np.diff(here) == way) for way in (1, -1))
            path = "".join(
                f"M{self.x(a):.1f} {y + 4}H{max(self.x(b), self.x(a) + 0.5):.1f}"
                for a, b in zip(starts.tolist(), ends.tolist())
            )
            yield f'<path d="{path}" stroke="{PHASES[phase]}" stroke-width="{_LANE - 3}" fill="none"/>\n'

    def _ticks(self) -> Iterator[str]:
        unit = 1
        while self.top / unit > 10:
            unit *= 2
        for byte in range(0, self.top + 1, unit):
            yield f'<path d="M{_LEFT} {self.y(byte):.1f}H{self.width - _RIGHT}" stroke="#e7eaef" fill="none"/>\n'
            yield _text(_LEFT - 6, self.y(byte) + 4, format_bytes(byte), "end", size=11)
        for i in range(6):
            step = self.steps * i // 5
            time = (
                f", {self.line.edges[min(step, len(self.line.phases))] / 1e6:,.3g} ms" if self.line.nanoseconds else ""
            )
            anchor = "start" if i == 0 else "end" if i == 5 else "middle"
            yield _text(
                self.x(step),
                self.height - _LOWER + 15,
                f"{'instruction ' if i == 0 else ''}{step:,}{time}",
                anchor,
                size=11,
            )

    def _buffer(self, b: NamedBuffer) -> str:
        x, y = self.x(b.lower), self.y(self.base[b.region] + b.offset + b.nbytes)
        w, h = max(0.3, self.x(b.upper) - x), max(0.3, self.y(self.base[b.region] + b.offset) - y)
        seam = ' stroke="#ffffff" stroke-width="0.6"' if w > 3 and h > 3 else ""
        told = _escaped(f"{b.name} {b.shape} {format_bytes(b.nbytes)} [{b.lower}, {b.upper})")
        rect = f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{COLOURS[b.category]}"{seam}>'
        label = ""
        if h > 13 and w > 60:
            shown = b.name if len(b.name) * 6.5 < w - 8 else b.name[: max(1, int((w - 16) / 6.5))] + "…"
            label = _text(x + 4, y + h / 2 + 4, shown, size=11, fill="#ffffff")
        return f"{rect}<title>{told}</title></rect>\n{label}"

    def _legend(self) -> Iterator[str]:
        x, y = float(_LEFT), self.height - 9
        for category, nbytes in self.memory.categories.items():
            if nbytes:
                told = f"{category.replace('_', ' ')} {format_bytes(nbytes)}"
                yield f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{COLOURS[category]}"/>\n'
                yield _text(x + 14, y, told, size=11)
                x += 26 + 6.3 * len(told)
        if self.left_out:
            yield _text(self.width - _RIGHT, y, f"{self.left_out:,} smaller buffers are not drawn", "end", size=11)


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _text(
    x: float, y: float, text: str, anchor: str = "start", weight: int = 400, size: int = 12, fill: str = "#4d5664"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}" '
        f'fill="{fill}">{_escaped(text)}</text>\n'
    )
