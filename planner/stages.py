"""The stages of a plan, one after the other: what each brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.planner.driver import find_base
from foreplan.planner.order.best import improve
from foreplan.planner.order.dependences import dependences
from foreplan.planner.order.heuristics import program_order, updates_first, updates_last
from foreplan.planner.placement.layout import arena_bytes, lay_out, schedule
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Problem
from foreplan.planner.recompute.lateness import as_late
from foreplan.planner.recompute.schedules import late_updates
from foreplan.planner.verify.wellformed import check_plan


@dataclass(frozen=True, slots=True)
class Stage:
    """The bytes after a stage.

    Attributes:
        name: program order, order, alias, updates, remat, reorder (where the plan has another order than the search for
            what to recompute) or placement.
        detail: what it did, for people.
        live_bytes: the highest live set of its schedule.
        arena_bytes: height of the arena; before the last stage, by the first placer alone.
    """

    name: str
    detail: str
    live_bytes: int
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class Stages:
    """How a plan was found.

    Attributes:
        stages: in order.
        each_once_bytes: no order that runs each of the actions once needs less; 0 where nothing was proved.
    """

    stages: tuple[Stage, ...]
    each_once_bytes: int


def explain(problem: Problem, plan: Plan) -> Stages:
    """The stages that led to a plan, each on top of those before it: the listed order, with all updates at the end and
    no optional write in place; the best order; writing in place; updates as soon as possible; recomputation, each run
    as late as possible; the same steps in the plan's own order; placement.

    The orders are searched again, so it takes as long as planning.

    Raises:
        PlanError: the problem is not well-formed, or the plan answers another one.
    """
    check_plan(plan, problem)
    graph = dependences(problem)
    base = find_base(problem).schedule
    program = updates_last(problem, graph, program_order(problem, graph))
    best = updates_last(problem, graph, base.order)
    steps = [step.action for step in plan.steps]
    copies = sum(action in problem.copies for action in steps)
    again = len(steps) - len(base.order)
    more = f"{again:,} more steps" + (f", {copies:,} of them copies" if copies else "")
    rows: list[tuple[str, str, Problem, Sequence[int], bool]] = [
        ("program order", "as listed, nothing in place, updates last", problem, program, False),
        ("order", base.name, problem, best, False),
        ("alias", "results take the bytes of what dies", problem, best, True),
        ("updates", "where the best order has them", problem, base.order, True),
    ]
    orders = dict.fromkeys((base.order, tuple(best), tuple(updates_first(problem, graph))))
    late = as_late(problem, steps, [late_updates(problem, order) for order in orders]) if again else None
    if late is None:
        rows.append(("remat", more if again else "none", problem, steps, True))
    else:
        rows.append(("remat", f"{more}, as late as something needs them", late.problem, late.order, True))
        rows.append(("reorder", "the same steps, runs moved", problem, steps, True))
    stages = []
    for name, detail, of, order, in_place in rows:
        made = schedule(of, name, order, in_place=in_place)
        layout = lay_out(of, made, quick=True)
        stages.append(Stage(name, detail, made.bound, arena_bytes(of, layout.heights)))
    stages.append(Stage("placement", plan.certificate.placement, plan.lower_bound_bytes, plan.arena_bytes))
    found = improve(problem, graph, base.order)
    return Stages(tuple(stages), 0 if found is None else found.least)
