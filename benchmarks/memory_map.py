"""How long a frame of the memory map takes in Chromium, for plans of up to 100,000 buffers.

`python -m benchmarks.memory_map`, in the repository's root, writes the table into docs/memory-map.md and
results/memory-map.json. It needs what `make setup-browser` installs. No card is used: Chromium runs without a window,
and draws by the processor.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import ROOT, put
from foreplan.report.memory import Memory
from foreplan.views.memory_map import map_html
from tests.views.browser import Screen, browser
from tests.views.large import large

RESULTS = ROOT / "benchmarks" / "results" / "memory-map.json"
SIZES = ((2_000, 10), (20_000, 1), (20_000, 10))  # instructions, values that each of the first half makes
FRAMES = 200
# Moves the view from frame to frame, and notes the milliseconds of the script's part of each, and those between frames.
PAN = """async (frames) => {
  showAll();
  const scripts = [], between = [], span = endOf() * 0.7;
  let last = 0;
  for (let i = 0; i < frames + 1; i++) {
    await new Promise(requestAnimationFrame);
    const begin = performance.now();
    if (last) between.push(begin - last);
    last = begin;
    const x0 = (endOf() - span) * i / frames;
    Object.assign(view, { x0, x1: x0 + span });
    draw();
    scripts.push(performance.now() - begin);
  }
  return [scripts, between];
}"""


def measure(chromium: Any, folder: Path, instructions: int, each: int) -> dict[str, Any]:
    text = map_html([Memory(*large(instructions, each))])
    screen = Screen(chromium, folder)
    page = screen.open(text)
    page.evaluate(PAN, FRAMES)  # the first time compiles the page's code
    scripts, between = page.evaluate(PAN, FRAMES)
    assert not screen.errors
    row = {
        "instructions": instructions,
        "buffers": screen.state("P.count"),
        "page_bytes": len(text),
        "load_ms": round(screen.state("performance.getEntriesByType('navigation')[0].loadEventEnd")),
        "script_ms": round(statistics.median(scripts), 1),
        "script_ms_95": round(statistics.quantiles(scripts, n=20)[-1], 1),
        "frame_ms": round(statistics.median(between), 1),
        "frame_ms_95": round(statistics.quantiles(between, n=20)[-1], 1),
    }
    page.close()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| instructions | buffers | page, MB | opens in, ms | script, ms | 95 % | frame to frame, ms | 95 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = (row[key] for key in ("load_ms", "script_ms", "script_ms_95", "frame_ms", "frame_ms_95"))
        cells = (f"{row['instructions']:,}", f"{row['buffers']:,}", f"{row['page_bytes'] / 1e6:.1f}", *map(str, times))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    with browser() as chromium, tempfile.TemporaryDirectory() as folder:
        rows = [measure(chromium, Path(folder), *size) for size in SIZES]
        version = chromium.version
    RESULTS.write_text(json.dumps({"chromium": version, "window": "1500x1200", "rows": rows}, indent=1) + "\n")
    put("docs/memory-map.md", "frames", table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
