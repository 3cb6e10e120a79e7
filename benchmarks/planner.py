"""What recomputation buys on the zoo: arena in MiB at 0, +1, +5 and +20 % more predicted time, and more flops.

Nesterov momentum, NumPy target, workspace included. `python benchmarks/planner.py [MODEL ...]` prints both tables and
writes them into docs/planner.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pages import MIB, put

import foreplan as fp
from foreplan.planner import Plan, plan_curve, totals
from foreplan.planner.memory.order_bound import order_bound

WORK = 100_000  # for the bound of all schedules
LIMITS = (0.0, 0.01, 0.05, 0.20)
HEAD = (
    "| model | 0 % | ≤ +1 % | ≤ +5 % | ≤ +20 % | least found | adds | no schedule below | over the bound, at most |",
    "|---|---|---|---|---|---|---|---|---|",
)


def row(name: str, cost: str) -> str:
    graph = fp.models.build(name)
    loss = getattr(fp.losses, fp.models.default_loss(name))
    program = fp.lower(fp.differentiate(graph, loss, fp.optim.Nesterov(0.1)))
    curve = plan_curve(program, cost)

    def extra(orders: Sequence[Sequence[int]]) -> list[float]:
        found = totals(program, orders)
        return [each.extra_flops_ratio if cost == "flops" else each.extra_seconds_ratio for each in found]

    def of(plan: Plan) -> Sequence[int]:
        return [step.action for step in plan.steps]

    whole = curve.plan(0)
    own = sum(getattr(program.actions[action], cost) for action in of(whole))
    found = [curve.lowest(int(own * limit)) for limit in LIMITS]
    assert all(more <= limit + 1e-9 for more, limit in zip(extra([of(plan) for plan in found]), LIMITS))
    gap = max(plan.arena_bytes / plan.lower_bound_bytes - 1 for plan in found)
    least = curve.plan(len(curve) - 1)
    cells = [
        f"`{name}`",
        *(f"{plan.arena_bytes / MIB:,.0f}" for plan in found),
        f"{least.arena_bytes / MIB:,.0f}",
        f"{extra([of(least)])[0]:+.1%}",
        f"{order_bound(program, WORK) / MIB:,.0f}",
        f"{gap:.2%}",
    ]
    line = "| " + " | ".join(cells) + " |"
    print(line, flush=True)
    return line


def main() -> None:
    names = sys.argv[1:] or list(fp.models.names())
    tables = []
    for cost, words in (("nanoseconds", "predicted time"), ("flops", "flops")):
        print("\n".join((f"More {words}, at most:", "", *HEAD)))
        tables.append("\n".join((f"More {words}, at most:", "", *HEAD, *(row(name, cost) for name in names))))
    if not sys.argv[1:]:
        put("benchmarks/results/budgets.md", "curve", "\n\n".join(tables))


if __name__ == "__main__":
    main()
