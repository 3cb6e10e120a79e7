"""Hard instances of offset search: twenty that are harder than MiniMalloc's, from seeds, and those of real plans.

    python benchmarks/hard_instances.py [FOLDER] [--seconds N] [--minimalloc BINARY] [--omnimalloc PYTHON]
        [--only cuts|plans]

They are written to two folders in FOLDER (by default a temporary one) as NAME.CAPACITY.csv, and benchmarks/placement.py
runs all placers on them; a table each.

`cuts`: each is cut from a full rectangle. So a placement without any hole exists, and its height, the capacity, is the
optimum. Cuts are random: `guillotine` halves the largest of a few pieces, `uneven` any piece, `pinwheel` also cuts
pieces into five with no cut from side to side, and `wired` has more cuts across time.

`plans`: training steps of some models of the zoo at odd batches. Values that share bytes are one buffer (`shared`), or
each value has its own (`values`), both for the plan without a budget; and they share bytes in the plan in the middle of
the curve of budgets (`budget`). Their capacity is the highest live set, which need not be within reach.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import placement

import foreplan as fp
from foreplan.base.units import align_up
from foreplan.planner import Plan, Problem, plan_curve
from foreplan.planner.placement.layout import schedule

Piece = tuple[int, int, int, int]  # begin, end, bottom, top
Choice = Callable[[random.Random, list[Piece]], int]
UNIT = 64  # bytes
HEIGHT = 1 << 14  # units of a rectangle
COUNTS = (300, 500, 800, 1200, 2000)
NAMES = ("guillotine", "uneven", "pinwheel", "wired")
MODELS = ("mobilenet_v2", "resnet18", "resnet50", "resnet101", "unet")
BATCHES = (1, 3, 7)


def area(piece: Piece) -> int:
    """Of a piece, in steps times units."""
    begin, end, bottom, top = piece
    return (end - begin) * (top - bottom)


def halves(rng: random.Random, piece: Piece, upright: float) -> list[Piece]:
    """A piece cut in two, across time as often as `upright` says; itself where it is too small."""
    begin, end, bottom, top = piece
    if rng.random() < upright and end - begin > 1:
        at = rng.randint(begin + 1, end - 1)
        return [(begin, at, bottom, top), (at, end, bottom, top)]
    if top - bottom > 1:
        at = rng.randint(bottom + 1, top - 1)
        return [(begin, end, bottom, at), (begin, end, at, top)]
    return [piece]


def fives(rng: random.Random, piece: Piece) -> list[Piece]:
    """A piece cut into four around a fifth, with no cut from side to side; in two where it is too small."""
    begin, end, bottom, top = piece
    if end - begin < 3 or top - bottom < 3:
        return halves(rng, piece, 0.5)
    a, b = sorted(rng.sample(range(begin + 1, end), 2))
    c, d = sorted(rng.sample(range(bottom + 1, top), 2))
    return [(begin, b, bottom, c), (b, end, bottom, d), (a, end, d, top), (begin, a, c, top), (a, b, c, d)]


def pieces(name: str, count: int, seed: int) -> list[Piece]:
    """At least `count` pieces of one rectangle."""
    rng = random.Random(f"{name} {count} {seed}")
    found: list[Piece] = [(0, max(100, count), 0, HEIGHT)]
    while len(found) < count:
        sample = [rng.randrange(len(found)) for _ in range(1 if name == "uneven" else 8)]
        piece = found.pop(max(sample, key=lambda k: area(found[k])))
        if name == "pinwheel" and rng.random() < 0.5:
            found += fives(rng, piece)
        else:
            found += halves(rng, piece, 0.7 if name == "wired" else 0.5)
    rng.shuffle(found)
    return found


def write_cuts(folder: Path, seed: int) -> None:
    """All cut instances, as CSV."""
    for name in NAMES:
        for count in COUNTS:
            rows = [f"{i},{a},{b},{UNIT * (d - c)}" for i, (a, b, c, d) in enumerate(pieces(name, count, seed))]
            path = folder / f"{name}-{count}.{UNIT * HEIGHT}.csv"
            path.write_text("id,lower,upper,size\n" + "\n".join(rows) + "\n")


def lives(problem: Problem, plan: Plan, *, shared: bool) -> placement.Buffers:
    """What a plan places in the arena, sizes rounded up to the alignment: alias sets and workspaces."""
    order = [step.action for step in plan.steps]
    sets = schedule(problem, "of the plan", order, in_place=shared).alias_sets
    arena = [region.name for region in problem.regions].index("arena")
    found = [
        (lower, upper, align_up(nbytes, UNIT))
        for lower, upper, nbytes, region in zip(sets.lower, sets.upper, sets.nbytes, sets.region)
        if region == arena and lower < upper and nbytes
    ]
    workspaces = [problem.actions[action].workspace for action in order]
    return found + [(step, step + 1, align_up(nbytes, UNIT)) for step, nbytes in enumerate(workspaces) if nbytes]


def write_plans(folder: Path) -> None:
    """All instances of plans, as CSV."""
    for name, batch in itertools.product(MODELS, BATCHES):
        loss = getattr(fp.losses, fp.models.default_loss(name))
        step = fp.differentiate(fp.models.build(name, batch=batch), loss, fp.optim.Nesterov(0.1))
        problem = fp.lower(step)
        free, curve = fp.planner.plan(problem), plan_curve(problem, thorough=False)
        forms = {
            "shared": lives(problem, free, shared=True),
            "values": lives(problem, free, shared=False),
            "budget": lives(problem, curve.plan(len(curve) // 2), shared=True),
        }
        for form, buffers in forms.items():
            rows = [f"{i},{lower},{upper},{size},{UNIT}" for i, (lower, upper, size) in enumerate(buffers)]
            path = folder / f"{name}-{batch}-{form}.{placement.live_peak(buffers)}.csv"
            path.write_text("id,lower,upper,size,alignment\n" + "\n".join(rows) + "\n")


def show(options: argparse.Namespace, bounds: bool) -> None:
    """Print the table of a folder, with the bounds and more digits where they are asked for."""
    peers = {"MiniMalloc": options.minimalloc, "OmniMalloc": options.omnimalloc}
    heads = ["foreplan", *(name for name, given in peers.items() if given)]
    columns = ["instance", "buffers", *(["bound"] if bounds else []), *(f"{head}, over" for head in heads)]
    columns.append("seconds of processor")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for _, group in itertools.groupby(placement.runs(options), key=lambda run: run.instance):
        row = list(group)
        cells = [row[0].instance, f"{row[0].buffers:,}", *([f"{row[0].bound:,}"] if bounds else [])]
        for run in row:
            over = "—" if run.height is None else f"{run.height / run.bound - 1:.4%}"
            cells.append(over if bounds else run.gap)
        print(f"| {' | '.join(cells)} | {', '.join(f'{run.processor:.2f}' for run in row)} |", flush=True)


def main() -> None:
    """Write the instances and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--effort", type=float, default=8.0, help="of foreplan place")
    parser.add_argument("--minimalloc", metavar="BINARY")
    parser.add_argument("--omnimalloc", metavar="PYTHON", help="an interpreter that can import omnimalloc")
    parser.add_argument("--seconds", type=float, default=8.0, help="that a peer may take")
    parser.add_argument("--only", choices=("cuts", "plans"), help="one of the two tables")
    parser.set_defaults(lowest=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        for kind in (options.only,) if options.only else ("cuts", "plans"):
            options.folder = folder / kind
            options.folder.mkdir(parents=True, exist_ok=True)
            if kind == "cuts":
                write_cuts(options.folder, options.seed)
            else:
                write_plans(options.folder)
            show(options, bounds=kind == "plans")


if __name__ == "__main__":
    main()
