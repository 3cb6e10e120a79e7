"""How far placements of irregular graphs are above their bound, and the time that they take.

    python -m benchmarks.irregular [--buffers N] [--effort N]

Each action reads one to three earlier values: half of them are such that nobody has read yet, the others lie among the
last `window`, or anywhere before with the probability `far`. A value lives from its action to its last reader. A third
of the actions need workspace. Sizes are lognormal, in multiples of 64 bytes. Nothing but offsets is searched: the order
of the actions stays. Processor seconds of `place`, with the compiled code cached.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from foreplan.planner import place
from foreplan.planner.effort import USUAL
from tests.planner.problems import wiring

KINDS = (  # window, far, sigma of the sizes
    (10, 0.1, 1.0),
    (50, 0.0, 2.0),
    (50, 0.02, 1.0),
    (300, 0.0, 0.5),
    (300, 0.05, 1.0),
)
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
WORK_PER_SECOND = 400_000_000  # as `foreplan place` counts effort


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffers", type=int, default=SIZES[-1], help="of the largest graphs, about")
    parser.add_argument("--effort", type=float, help="as of foreplan place; by default that of plans")
    options = parser.parse_args()
    work = USUAL.placement.layout_work if options.effort is None else round(options.effort * WORK_PER_SECOND)
    print("| window | far | sigma | buffers | alive at once | over the bound | processor s |")
    print("|---|---|---|---|---|---|---|")
    for window, far, sigma in KINDS:
        for actions in (size for size in SIZES if size <= options.buffers):
            lower, upper, size = wiring(f"{actions} {window} {far} {sigma}", actions, window, sigma, far)
            place(lower[:400], upper[:400], size[:400], 64, work=work)
            started = time.process_time()
            found = place(lower, upper, size, 64, work=work)
            seconds = time.process_time() - started
            births, deaths = (np.bincount(times, minlength=actions + 1) for times in (lower, upper))
            cells = [window, far, sigma, f"{len(size):,}", f"{int(np.cumsum(births - deaths).max()):,}"]
            gap = found.height / found.lower_bound - 1
            print(f"| {' | '.join(map(str, cells))} | {gap:.2%} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
