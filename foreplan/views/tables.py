"""The buffers of a plan as a table in a CSV file."""

from __future__ import annotations

import csv
import io

from foreplan.report.memory import Memory, printable
from foreplan.report.timeline import Timeline

COLUMNS = (
    "id", "name", "shape", "category", "region", "offset", "size", "lower", "upper", "begin_ns", "end_ns", "value",
    "written", "writer", "phase", "readers",
)  # fmt: skip


def csv_text(memory: Memory) -> str:
    """One row per buffer, in the planner's order.

    `lower` and `upper` are instructions (half-open), `begin_ns` and `end_ns` the same in predicted time. `value` is the
    same for all lives of one value, those in host memory too, and -1 for a workspace. `written` is the instruction that
    writes it, -1 where none does; `writer` and `phase` are those of that instruction. `readers` has all instructions
    that read it, with spaces between.
    """
    line = Timeline.of(memory.problem, memory.plan)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for i, b in enumerate(memory.buffers):
        times = (int(line.edges[min(step, len(line.phases))]) for step in (b.lower, b.upper))
        phase = line.phases[b.written] if b.written >= 0 else ""
        place = (b.category, b.region, b.offset, b.nbytes, b.lower, b.upper, *times)
        writer = (b.written, printable(b.producer), phase, " ".join(map(str, b.readers)))
        rows.writerow((i, printable(b.name), b.shape, *place, memory.things.get(b.value, b.value), *writer))
    return text.getvalue()
