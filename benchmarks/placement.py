"""The placer against its peers, on a folder of instances: CSV files named NAME.CAPACITY.csv, in MiniMalloc's form.

    python benchmarks/placement.py FOLDER [--effort N] [--lowest] [--minimalloc BINARY] [--omnimalloc PYTHON]
        [--seconds N]

Each row is a run of a whole command on one instance: the height that it reached and the time that it took, start of the
interpreter included, in seconds of wall clock and of processor. `foreplan place` runs twice: within the instance's
capacity, and as low as it gets (with `--lowest`, only that). OmniMalloc (PyPI) is run by the Python that has it, with
its `supermalloc` allocator; MiniMalloc is its own binary. Every placement is checked here. The compiled code's cache is
filled before.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

Buffers = list[tuple[int, int, int]]  # lower, upper, size

OMNIMALLOC = """
import csv, sys
import omnimalloc
from omnimalloc.allocators.supermalloc import SupermallocAllocator
with open(sys.argv[1]) as file:
    rows = [{k: int(v) for k, v in row.items()} for row in csv.DictReader(file)]
pool = [omnimalloc.Allocation(id=i, size=r["size"], start=r["lower"], end=r["upper"]) for i, r in enumerate(rows)]
placed = {a.id: a.offset for a in omnimalloc.allocate(pool, SupermallocAllocator(timeout=float(sys.argv[3])))}
with open(sys.argv[2], "w") as file:
    print("id,lower,upper,size,offset", file=file)
    for i, r in enumerate(rows):
        print(r["id"], r["lower"], r["upper"], r["size"], placed[i], sep=",", file=file)
"""


def read(path: Path) -> tuple[Buffers, list[int]]:
    """Buffers of a CSV file, and their offsets if it has them."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    buffers = [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in rows]
    return buffers, [int(row["offset"]) for row in rows if row.get("offset")]


def live_peak(buffers: Buffers) -> int:
    """The highest live set in bytes, which no height can be below."""
    times = {lower for lower, _, _ in buffers}
    return max(sum(size for lower, upper, size in buffers if lower <= t < upper) for t in times)


def height_of(buffers: Buffers, offsets: list[int]) -> int:
    """The height of a placement, after a check that none of its buffers overlap."""
    if len(offsets) != len(buffers):
        raise SystemExit(f"{len(offsets)} offsets for {len(buffers)} buffers")
    placed = sorted((lower, upper, at, at + size) for (lower, upper, size), at in zip(buffers, offsets))
    alive: list[tuple[int, int, int, int]] = []
    for one in placed:
        alive = [other for other in alive if other[1] > one[0]]
        if any(max(one[2], other[2]) < min(one[3], other[3]) for other in alive):
            raise SystemExit("a placement with buffers that overlap")
        alive.append(one)
    return max(end for _, _, _, end in placed)


def measure(command: Sequence[str], table: Path, out: Path, limit: float) -> tuple[int | None, float, float]:
    """Run a command that writes `out`: the height it reached, or None; seconds of wall clock, and of processor."""
    out.unlink(missing_ok=True)
    before, start = os.times(), time.perf_counter()
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=limit, check=False)
    wall, after = time.perf_counter() - start, os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    if not out.exists():
        return None, wall, processor
    buffers, offsets = read(out)
    return height_of(buffers, offsets), wall, processor


def commands(options: argparse.Namespace, table: Path, out: Path, capacity: str) -> dict[str, list[str]]:
    """The command of each row."""
    ours = [sys.executable, "-c", "from foreplan.cli import main; main()", "place", str(table), "-o", str(out)]
    ours += ["--effort", str(options.effort)]
    found = {} if options.lowest else {"foreplan, capacity": [*ours, "--capacity", capacity]}
    found["foreplan, lowest"] = ours
    if options.minimalloc:
        given = [options.minimalloc, f"--input={table}", f"--output={out}", f"--timeout={options.seconds}s"]
        found["minimalloc, capacity"] = [*given, f"--capacity={capacity}"]
    if options.omnimalloc:
        found["omnimalloc, lowest"] = [options.omnimalloc, "-c", OMNIMALLOC, str(table), str(out), str(options.seconds)]
    return found


class Run(NamedTuple):
    """One placer on one instance: the height, if it wrote a placement, and seconds of wall clock and of processor."""

    instance: str
    buffers: int
    bound: int
    capacity: str
    placer: str
    height: int | None
    wall: float
    processor: float

    @property
    def gap(self) -> str:
        """How far the height is above the bound."""
        return "—" if self.height is None else f"{self.height / self.bound - 1:.2%}"


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """Every placer on every instance of a folder."""
    tables = sorted(
        options.folder.glob("*.*.csv"), key=lambda path: (path.name.split("-")[0], len(path.name), path.name)
    )
    if not tables:
        raise SystemExit(f"no NAME.CAPACITY.csv in {options.folder}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.csv"
        for number, path in enumerate(tables):
            buffers, _ = read(path)
            name, capacity = path.name.split(".")[0], path.name.split(".")[-2]
            rows = commands(options, path, out, capacity)
            if number == 0:
                measure(next(iter(rows.values())), path, out, 600)
            for placer, command in rows.items():
                found = measure(command, path, out, 2 * options.seconds + 20 * options.effort)
                yield Run(name, len(buffers), live_peak(buffers), capacity, placer, *found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--effort", type=float, default=10.0, help="of foreplan place")
    parser.add_argument("--minimalloc", metavar="BINARY")
    parser.add_argument("--omnimalloc", metavar="PYTHON", help="an interpreter that can import omnimalloc")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a peer may take")
    parser.add_argument("--lowest", action="store_true", help="foreplan runs without a capacity only")
    print("| instance | buffers | bound | capacity | placer | height | over the bound | wall s | processor s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for run in runs(parser.parse_args()):
        height = "none" if run.height is None else f"{run.height:,}"
        cells = [run.instance, f"{run.buffers:,}", f"{run.bound:,}", run.capacity, run.placer, height, run.gap]
        print(f"| {' | '.join(cells)} | {run.wall:.2f} | {run.processor:.2f} |", flush=True)


if __name__ == "__main__":
    main()
