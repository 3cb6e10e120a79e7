"""A step of three instructions whose memory can be worked out by hand, and a plan of it."""

from __future__ import annotations

from foreplan.planner.plan import Certificate, Plan, Step
from foreplan.planner.problem import Action, Category, Overwrite, Problem, Region, Role, Value

KIB = 1024
EVIL = "</script><script>alert(1)</script>"


def small(scale: int = 1, evil: bool = False) -> tuple[Problem, Plan]:
    """A weight (4 KiB), an input (2 KiB), an activation (8 KiB x scale), its gradient (1 KiB) and an update in place.

    instruction  alive in the arena                                     with the weight
    0 forward    x 2, a 8*scale, scratch 3 KiB = 13 (scale 1)           17 KiB: the peak
    1 backward   a 8*scale, g 1                = 9                      13 KiB
    2 update     g 1                           = 1                       5 KiB
    """
    values = (
        Value("w", 4 * KIB, region=0, category=Category.PARAMETERS, role=Role.STORED),
        Value("x", 2 * KIB, region=1, category=Category.INPUTS, role=Role.INPUT),
        Value(EVIL if evil else "a", 8 * KIB * scale, region=1),
        Value("g", KIB, region=1, category=Category.GRADIENTS),
        Value("w/next", 4 * KIB, region=0, category=Category.PARAMETERS, role=Role.OUTPUT, home=0),
    )
    actions = (
        Action("forward", (0, 1), (2,), workspace=3 * KIB, workspace_region=1, flops=100),
        Action("backward", (2,), (3,), flops=200),
        Action("update", (0, 3), (4,), overwrites=(Overwrite(0, 0, required=True),), effect=True, flops=10),
    )
    problem = Problem(values, actions, (Region("persistent"), Region("arena")))
    a, top = 2 * KIB, (2 + 8 * scale) * KIB
    plan = Plan(
        problem_digest=problem.digest,
        steps=(Step(0, (0, 0), (a,), top), Step(1, (a,), (0,)), Step(2, (0, 0), (0,))),
        starts=((0, 0), (1, 0)),
        ends=((4, 0),),
        heights=(4 * KIB, top + 3 * KIB),
        arena_bytes=4 * KIB + top + 3 * KIB,
        lower_bound_bytes=4 * KIB + top + 3 * KIB,
        order_lower_bound_bytes=None,
        certificate=Certificate(0, "by hand", "program"),
    )
    return problem, plan
