"""How far budgeted plans are from the optimum, and what budgets the large models of the zoo meet.

`python -m benchmarks.optimality [small] [large]`, in the repository's root. `small`: training steps of some tens of
actions, whose cheapest recomputation within a budget CP-SAT finds and proves (tests/planner/exact_remat.py); a row a
graph, with what the planner's plans cost over the optimum at each share of the unbudgeted arena, and then the average
and the largest. `large`: whether budgets are met, else the least found, against a bound that no schedule goes below.
"""

from __future__ import annotations

import sys
import time

import foreplan as fp
from foreplan.base.errors import DoesNotFitError
from foreplan.planner import Plan, plan, plan_curve
from tests.planner.near_optimal import SHARES, Comparison, compare
from tests.planner.training_graphs import GRAPHS, nothing_in_place

SECONDS = 60  # for one budget
MODELS = ("resnet50:batch=32", "unet:batch=4", "gpt2_small:batch=4,seq=1024", "bert_base:batch=8,seq=512")
BUDGETS = (0.8, 0.6, 0.5, 0.4)
MIB = 2**20


def cell(found: Comparison | None) -> str:
    """Cost over optimum, in parentheses where unproved; `-` where nothing fits; where something does and no plan was
    found, `missed`, or `not placed` where only its live bytes fit.
    """
    if found is None or (found.ours is None and found.exact.cost is None):
        return "-" if found is None or found.exact.proved else "?"
    if found.ours is None:
        return "missed" if found.missed else "not placed"
    if found.ratio is None:
        return f"(≤ {found.ours / max(found.exact.bound or 1, 1):.4f})"
    return f"{found.ratio:.4f}"


def small() -> None:
    """The table of small graphs."""
    print("| graph | actions | in place | " + " | ".join(f"{share:.0%}" for share in SHARES) + " | solved in |")
    print("|---|---|---|" + "---|" * (len(SHARES) + 1))
    everything: list[Comparison] = []
    for name, make in GRAPHS.items():
        for in_place in (False, True):
            problem = make() if in_place else nothing_in_place(make())
            started = time.perf_counter()
            found = {each.share: each for each in compare(problem, SECONDS)}
            seconds = time.perf_counter() - started
            everything += found.values()
            cells = " | ".join(cell(found.get(share)) for share in SHARES)
            print(
                f"| {name} | {len(problem.actions)} | {'yes' if in_place else 'no'} | {cells} | {seconds:.1f} s |",
                flush=True,
            )
    ratios = [each.ratio for each in everything if each.ratio is not None]
    print(
        f"\n{len(ratios)} budgets met with a proven optimum: {sum(ratios) / len(ratios):.4f} times it on average, "
        f"{max(ratios):.4f} at most; {sum(ratio > 1.05 for ratio in ratios)} above 1.05; "
        f"{sum(each.missed for each in everything)} more that a schedule meets and no plan found; "
        f"{sum(cell(each) == 'not placed' for each in everything)} that only live bytes meet; "
        f"{sum(not each.exact.proved for each in everything)} without proof within {SECONDS} s."
    )


def large() -> None:
    """The table of the zoo's large models."""
    print("| model | budget | MiB | met | arena, MiB | time added | no schedule below, MiB | arena over that |")
    print("|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        loss = getattr(fp.losses, fp.models.default_loss(name))
        program = fp.lower(fp.differentiate(fp.models.build(name), loss, fp.optim.Nesterov(0.1)))
        whole = plan(program, remat="off")
        curve = plan_curve(program)
        print(row(name, "none", program, whole, whole, "yes"), flush=True)
        for share in BUDGETS:
            budget = int(whole.arena_bytes * share)
            try:
                found, met = curve.within(budget), "yes"
            except DoesNotFitError as error:
                assert isinstance(error.plan, Plan)
                found, met = error.plan, "no"
            print(row(name, f"{share:.0%} | {budget / MIB:,.0f}", program, whole, found, met), flush=True)
        least = min((curve.plan(index) for index in range(len(curve))[-3:]), key=lambda found: found.arena_bytes)
        print(row(name, f"{least.arena_bytes / whole.arena_bytes:.1%}, the least | ", program, whole, least, "yes"))


def row(name: str, budget: str, program: fp.Program, whole: Plan, found: Plan, met: str) -> str:
    """A row of the large table; `budget` is its share of `whole`, and its MiB."""
    bound = found.order_lower_bound_bytes or 0
    budget += " | " * ("|" not in budget)
    return (
        f"| `{name}` | {budget} | {met} | {found.arena_bytes / MIB:,.0f} | "
        f"{seconds(program, found) / seconds(program, whole) - 1:+.2%} | {bound / MIB:,.0f} | "
        f"{found.arena_bytes / bound - 1:+.1%} |"
    )


def seconds(program: fp.Program, found: Plan) -> float:
    """Predicted seconds of a plan's steps."""
    return sum(program.actions[step.action].nanoseconds for step in found.steps) / 1e9


def main() -> None:
    chosen = sys.argv[1:] or ["small", "large"]
    if "small" in chosen:
        small()
    if "large" in chosen:
        large()


if __name__ == "__main__":
    main()
