"""How far plans of the zoo are above their bounds, at several batch sizes, along the whole curve of budgets.

`python benchmarks/gaps.py [MODEL ...]`: a row a model and batch, with the points of its curve
that were laid out, how many of them are above the highest live set of their schedule, and by how much at most; without
models it also writes what each model comes to into results/placement.md. Nothing is executed. A curve is searched as
long as for a budget at the model's own batch, and shortly, as `plan_curve(..., thorough=False)` does, at the others.
"""

from __future__ import annotations

import sys
import time

from pages import put

import foreplan as fp
from foreplan.planner import Curve, Problem, plan_curve

BATCHES = (1, 2, 3, 7, 8, 16, 32, 33)
SHARES = (0.01, 0.05, 0.20)  # more cost than without recomputation, for which the lowest plan counts
EVEN = 12  # points at even distances beside them, the first and the last of the curve among them
HEAD = "| model | batches | plans | above their bound | over the bound, at most |\n|---|---|---|---|---|"


def chosen(curve: Curve) -> list[int]:
    """The points to lay out."""
    steps = curve.plan(0).steps
    usual = sum(curve.problem.actions[step.action].nanoseconds for step in steps)
    within = [sum(point.cost <= share * usual for point in curve.points) for share in SHARES]
    last = len(curve) - 1
    return sorted({*within, *(round(k * last / EVEN) for k in range(EVEN + 1))})


def gaps(name: str, batch: int, own: bool) -> list[float]:
    """Arena over bound, minus one, of a forward pass and of some plans of the curve of a training step."""
    graph = fp.models.build(name, batch=batch)
    loss = getattr(fp.losses, fp.models.default_loss(name))
    forward: Problem = fp.lower(graph)
    curve = plan_curve(fp.lower(fp.differentiate(graph, loss, fp.optim.Nesterov(0.1))), thorough=own)
    plans = [fp.planner.plan(forward), *(curve.plan(index) for index in chosen(curve))]
    return [plan.arena_bytes / plan.lower_bound_bytes - 1 for plan in plans]


def row(name: str) -> str:
    """A model's row of the table; a line for each batch on the way."""
    own = fp.models.zoo.MODELS[name].sizes["batch"]
    batches = sorted({*BATCHES, own})
    everything: list[float] = []
    for batch in batches:
        started = time.process_time()
        found = gaps(name, batch, batch == own)
        seconds = time.process_time() - started
        above = sum(gap > 0 for gap in found)
        print(f"{name}:batch={batch}: {above} of {len(found)}, {max(found):.4%}, {seconds:.1f} s", flush=True)
        everything += found
    above = sum(gap > 0 for gap in everything)
    return f"| `{name}` | {', '.join(map(str, batches))} | {len(everything)} | {above} | {max(everything):.4%} |"


def main() -> None:
    """Print the table, and write it down if it is whole."""
    table = "\n".join([HEAD, *(row(name) for name in sys.argv[1:] or fp.models.names())])
    print(table)
    if not sys.argv[1:]:
        put("benchmarks/results/placement.md", "gaps", table)


if __name__ == "__main__":
    main()
