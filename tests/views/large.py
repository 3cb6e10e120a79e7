"""A plan as large as they come, made by rule: no planner has to look for it."""

from __future__ import annotations

from foreplan.planner.plan import Certificate, Plan, Step
from foreplan.planner.problem import Action, Category, Problem, Region, Role, Value

BLOCK = 64


def large(instructions: int, each: int) -> tuple[Problem, Plan]:
    """A triangle, as of a training step: half of the instructions make `each` values, the other half reads them, last
    ones first. A stored value is read by all.

    Buffers: one, and `each` for each instruction of the first half, in `half` modules of ten instructions.
    """
    half = instructions // 2
    values = [Value("w", BLOCK, role=Role.STORED, category=Category.PARAMETERS)]
    actions, steps = [], []
    for i in range(half):
        made = range(len(values), len(values) + each)
        values += [
            Value(f"part{i // 100}.block{i // 10}.op{i}/out.{k}", BLOCK * (1 + k % 5), region=1) for k in range(each)
        ]
        actions.append(Action(f"part{i // 100}.block{i // 10}.op{i}", (0,), tuple(made), nanoseconds=1000 + i % 7))
    offsets, top = [0], 0
    for value in values[1:]:
        offsets.append(top)
        top += value.nbytes
    for i, action in enumerate(actions):
        steps.append(Step(i, (0,), tuple(offsets[v] for v in action.writes)))
    for i in reversed(range(half)):
        reads = (0, *actions[i].writes)
        actions.append(Action(f"part{i // 100}.block{i // 10}.op{i}/grad", reads, (), nanoseconds=2000))
        steps.append(Step(len(actions) - 1, tuple(offsets[v] for v in reads), ()))
    problem = Problem(tuple(values), tuple(actions), (Region("state"), Region("arena")))
    arena = BLOCK + top
    certificate = Certificate(half - 1, "by rule", "program")
    return problem, Plan(
        problem.digest, tuple(steps), ((0, 0),), ((0, 0),), (BLOCK, top), arena, arena, None, certificate
    )
