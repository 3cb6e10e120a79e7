"""What recomputation buys on the zoo: arena in MiB at 0, +1, +5 and +20 % more flops, NumPy target, workspace included.

`python benchmarks/planner.py [MODEL ...]` prints the table and writes it into docs/planner.md.
"""

from __future__ import annotations

import sys
import time

from pages import MIB, put

import foreplan as fp
from foreplan.planner import plan_curve

LIMITS = (0.0, 0.01, 0.05, 0.20)


def row(name: str) -> str:
    graph = fp.models.build(name)
    loss = getattr(fp.losses, fp.models.default_loss(name))
    program = fp.lower(fp.differentiate(graph, loss, fp.optim.Nesterov(0.1)))
    started = time.perf_counter()
    curve = plan_curve(program, cost="flops")
    flops = sum(program.actions[step.action].flops for step in curve.plan(0).steps)
    found = [curve.lowest(int(flops * limit)) for limit in LIMITS]
    seconds = time.perf_counter() - started
    extra = [sum(program.actions[s.action].flops for s in plan.steps) / flops - 1 for plan in found]
    assert all(more <= limit + 1e-9 for more, limit in zip(extra, LIMITS))
    gap = max(plan.arena_bytes / plan.lower_bound_bytes - 1 for plan in found)
    least = curve.plan(len(curve) - 1)
    cells = [
        f"`{name}`",
        *(f"{plan.arena_bytes / MIB:,.0f}" for plan in found),
        f"{least.arena_bytes / MIB:,.0f}",
        f"{gap:.2%}",
        f"{seconds:.1f} s",
    ]
    line = "| " + " | ".join(cells) + " |"
    print(line, flush=True)
    return line


def main() -> None:
    names = sys.argv[1:] or list(fp.models.names())
    head = [
        "| model | 0 % | ≤ +1 % | ≤ +5 % | ≤ +20 % | least found | over the bound, at most | planned in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(head))
    table = "\n".join([*head, *(row(name) for name in names)])
    if not sys.argv[1:]:
        put("docs/planner.md", "curve", table)


if __name__ == "__main__":
    main()
