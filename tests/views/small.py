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


def many_lives() -> tuple[Problem, Plan]:
    """A value that is copied to host memory, dropped, copied back, dropped, and computed again.

    instruction  time, µs  what it does           a lies
    0 f          [0, 1)    x -> a                 in the arena
    1 out        [1, 3)    a -> a at the host     in both
    2 g          [3, 4)    x -> b                 at the host
    3 back       [4, 6)    a at the host -> a     in both
    4 use        [6, 7)    a, b -> c              in the arena
    5 rest       [7, 8)    c -> d                 nowhere
    6 f          [8, 9)    x -> a                 in the arena
    7 end        [9, 10)   a, d -> y              in the arena
    """
    arena, host = 0, 1
    values = (
        Value("x", KIB, region=arena, category=Category.INPUTS, role=Role.INPUT),
        Value("block.a", 4 * KIB, region=arena),
        Value("block.a/host", 4 * KIB, region=host),
        Value("block.b", KIB, region=arena),
        Value("c", KIB, region=arena),
        Value("d", KIB, region=arena),
        Value("y", KIB, region=arena, category=Category.OUTPUTS, role=Role.OUTPUT),
    )
    x, a, away, b, c, d, y = range(7)
    actions = (
        Action("block.f", (x,), (a,), nanoseconds=1000),
        Action("block.a/out", (a,), (away,), nanoseconds=2000),
        Action("block.g", (x,), (b,), nanoseconds=1000),
        Action("block.a/back", (away,), (a,), nanoseconds=2000),
        Action("use", (a, b), (c,), nanoseconds=1000),
        Action("rest", (c,), (d,), nanoseconds=1000),
        Action("end", (a, d), (y,), nanoseconds=1000),
    )
    problem = Problem(values, actions, (Region("arena"), Region("host", on_device=False)))
    at = {x: 0, a: KIB, away: 0, b: 5 * KIB, c: 6 * KIB, d: 5 * KIB, y: 6 * KIB}
    steps = tuple(
        Step(i, tuple(at[v] for v in actions[i].reads), tuple(at[v] for v in actions[i].writes))
        for i in (0, 1, 2, 3, 4, 5, 0, 6)
    )
    plan = Plan(
        problem_digest=problem.digest,
        steps=steps,
        starts=((x, 0),),
        ends=((y, at[y]),),
        heights=(7 * KIB, 4 * KIB),
        arena_bytes=7 * KIB,
        lower_bound_bytes=7 * KIB,
        order_lower_bound_bytes=None,
        certificate=Certificate(4, "by hand", "by hand"),
    )
    return problem, plan
