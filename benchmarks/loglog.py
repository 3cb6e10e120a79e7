"""Lines over two logarithmic axes as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 36, 54
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8d5fd3", "#c77d0a", "#444444")

Points = Sequence[tuple[float, float]]


def loglog(title: str, across: str, up: str, lines: Mapping[str, Points], slope_from: tuple[float, float]) -> str:
    """An SVG of some lines, with a dashed one for what is proportional.

    Args:
        across, up: names of the axes.
        lines: points of each, all positive.
        slope_from: a point that the dashed line goes through.
    """
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    low_x, high_x = _decades(xs)
    low_y, high_y = _decades(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - low_x) / (high_x - low_x)
        above = (math.log10(y) - low_y) / (high_y - low_y)
        return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - above * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for power in range(low_x, high_x + 1):
        (x, bottom), (_, top) = place(10**power, 10**low_y), place(10**power, 10**high_y)
        parts.append(f'<path d="M{x:.1f} {bottom:.1f}V{top:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{10**power:,}</text>')
    for power in range(low_y, high_y + 1):
        (left, y), (right, _) = place(10**low_x, 10**power), place(10**high_x, 10**power)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(across)}</text>')
    parts.append(f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})">{escape(up)}</text>')
    ends = [(x, slope_from[1] * x / slope_from[0]) for x in (min(xs), max(xs))]
    shown = [(x, y) for x, y in ends if 10**low_y <= y <= 10**high_y]
    if len(shown) == 2:
        parts.append(f'<path d="{_path([place(*end) for end in shown])}" stroke="#999" stroke-dasharray="5 4"/>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(*point) for point in points]
        parts.append(f'<path d="{_path(placed)}" stroke="{colour}" stroke-width="2" fill="none"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        at = TOP + 16 + 20 * number
        parts.append(f'<path d="M{WIDTH - RIGHT + 14} {at - 4}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{at}">{escape(name)}</text>')
    at = TOP + 16 + 20 * len(lines)
    parts.append(f'<path d="M{WIDTH - RIGHT + 14} {at - 4}h20" stroke="#999" stroke-dasharray="5 4"/>')
    parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{at}">proportional</text>')
    return "\n".join([*parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
