"""Tiny problems against every placement and every schedule that there is: bounds hold, and right plans are accepted."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from foreplan.base.errors import PlanError
from foreplan.planner import Plan, Problem, check_problem, plan, verify
from foreplan.planner.memory.bounds import live_bytes
from foreplan.planner.memory.order_bound import order_bound
from tests.planner.tiny import Cells, TooLarge, draw, orders
from tests.profile import pick


def lowest(problem: Problem, order: list[int], bound: int) -> Plan | None:
    """The lowest plan of an order, from its bound on; None where it takes much more."""
    for more in range(3):
        cells = Cells(problem)
        if found := cells.fits(order, (-(-bound // cells.unit) + more) * cells.unit):
            return found
    return None


def check_order(problem: Problem, order: list[int]) -> str:
    """That no placement of an order is below its bound, and that the lowest is accepted with it; how close it comes."""
    live = live_bytes(problem, order)
    bound = int(live.max())
    assert Cells(problem).fits(order, bound - 1) is None
    found = lowest(problem, order, bound)
    if found is None:
        return "far above the bound"
    peak = replace(found.certificate, peak_step=int(live.argmax()))
    verify(replace(found, lower_bound_bytes=bound, certificate=peak), problem)
    return "at the bound" if found.arena_bytes - bound < Cells(problem).unit else "above the bound"


def check_all(problem: Problem) -> None:
    """That no schedule at all is below the bound over all of them."""
    assert not Cells(problem).any_fits(order_bound(problem) - 1)


def check_plan(problem: Problem) -> bool:
    """That planning gives a plan whose bounds hold for every placement of its order, and that the lowest such placement
    is accepted with the same figures; whether there is a plan."""
    try:
        found = plan(problem)
    except PlanError as error:
        assert type(error) is PlanError  # what must be overwritten is read again: not a plan that is refused
        return False
    order = [step.action for step in found.steps]
    assert found.order_lower_bound_bytes is not None
    assert found.order_lower_bound_bytes <= found.lower_bound_bytes <= found.arena_bytes
    assert Cells(problem).fits(order, found.lower_bound_bytes - 1) is None
    if other := lowest(problem, order, found.lower_bound_bytes):
        figures = {"lower_bound_bytes": found.lower_bound_bytes, "certificate": found.certificate}
        verify(replace(other, **figures), problem)
    return True


def campaign(first: int, count: int, plans: int) -> Counter[str]:
    """What became of `count` problems; one in `plans` is planned too."""
    told: Counter[str] = Counter()
    for seed in range(first, first + count):
        rng = random.Random(seed)
        problem = draw(rng)
        check_problem(problem)
        checks = [("all schedules", lambda p=problem: check_all(p))]
        checks += [("order", lambda p=problem, o=order: check_order(p, o)) for order in orders(rng, problem, 1)]
        checks += [("plan", lambda p=problem: check_plan(p))] if seed % plans == 0 else []
        for name, check in checks:
            try:
                told[f"{name}: {check()}"] += 1
            except TooLarge:
                told[f"{name}: too large"] += 1
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {name}\n{problem.as_text()}") from error
    return told


def test_no_placement_and_no_schedule_is_below_its_bound() -> None:
    count, plans = pick((100, 10), (120, 10), (2_000, 20))
    told = campaign(0, count, plans)
    print(dict(sorted(told.items())))
    assert told["all schedules: None"] > 0.8 * count
    assert told["order: at the bound"] > 0.7 * count
    assert told["plan: True"] > 0.5 * count / plans
