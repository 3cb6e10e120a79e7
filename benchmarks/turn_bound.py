"""What must be there when the loss is known: a bound for steps whose samples batch norm joins, by a linear program.

`python -m benchmarks.turn_bound` prints the rows, in MiB, for shares of the time that recomputation may add. At that
moment the backward pass has yet to read certain results of the forward pass. Each is there, or is computed again from
what is there. A share of the step's time limits the latter. No schedule, and no split of activations into parts whose
bytes and times add up, holds fewer bytes at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

import foreplan as fp
from foreplan.planner import Problem
from foreplan.planner.candidates import merge_candidates
from foreplan.planner.costs import costs_of
from foreplan.planner.problem import Role
from tests.compiler.chains import chain

MIB = 1 << 20
SHARES = (0.0, 0.01, 0.02, 0.025, 0.05)
GRADIENTS = ("cross_entropy/grad", "mse/grad")  # the first that the backward pass computes of the model's output


def bound(program: Problem, share: float) -> float:
    """MiB that are there when the first gradient is computed, if all recomputation behind it takes a share of the time.

    The relaxation: values may be kept, and actions run, in part. What no gradient needs before may run for nothing.
    """
    lean = merge_candidates(program, costs_of(program, "nanoseconds"))
    problem, costs = lean.problem, lean.costs
    actions, values = problem.actions, problem.values
    writer = {value: i for i, action in reversed([*enumerate(actions)]) for value in action.writes}
    first = [i for i, action in enumerate(actions) if any(name in action.name for name in GRADIENTS)]
    readers: dict[int, list[int]] = {}
    for i, action in enumerate(actions):
        for value in action.reads:
            readers.setdefault(value, []).append(i)
    behind = _reached(first, lambda i: (r for value in actions[i].writes for r in readers.get(value, ())))
    needed = _reached(first, lambda i: (writer[value] for value in actions[i].reads if value in writer))
    forward = [i for i in range(len(actions)) if i not in behind]
    made = sorted({value for i in forward for value in actions[i].writes})
    keep, run = {v: k for k, v in enumerate(made)}, {a: len(made) + k for k, a in enumerate(forward)}
    read = {value for i in behind for value in actions[i].reads}
    rows = [{keep[value]: -1.0, run[writer[value]]: -1.0, -1: -1.0} for value in sorted(read) if value in keep]
    for i in forward:
        for value in actions[i].reads:
            if value in keep and writer[value] != i:
                rows.append({run[i]: 1.0, keep[value]: -1.0, run[writer[value]]: -1.0, -1: 0.0})
    total = sum(costs)
    rows.append({run[i]: costs[i] / total for i in forward if i in needed} | {-1: share})
    entries = [(i, column, x) for i, row in enumerate(rows) for column, x in row.items() if column >= 0]
    at, columns, numbers = zip(*entries)
    matrix = coo_matrix((numbers, (at, columns)), shape=(len(rows), len(made) + len(forward)))
    objective = np.array([values[value].nbytes / MIB for value in made] + [0.0] * len(forward))
    found = linprog(objective, matrix, [row[-1] for row in rows], bounds=(0, 1), method="highs")
    there = sum(
        value.nbytes
        for i, value in enumerate(values)
        if value.role is Role.STORED or (value.role is Role.INPUT and i in read)
    )
    return float(found.fun) + there / MIB


def _reached(first: Iterable[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    """What can be reached in some steps, the first ones among it."""
    reached, stack = set[int](), list(first)
    while stack:
        one = stack.pop()
        if one not in reached:
            reached.add(one)
            stack += following(one)
    return reached


def main() -> None:
    print("| model | " + " | ".join(f"+{share:.1%}" for share in SHARES) + " |")
    print("|---" * (1 + len(SHARES)) + "|")
    steps: dict[str, tuple[fp.Graph, Any]] = {
        f"`{name}`": (fp.models.build(name), fp.models.default_loss(name)) for name in ("resnet50", "mobilenet_v2")
    }
    steps["chain with batch norm and ReLU"] = chain("batch norm and ReLU", 1024), fp.losses.mse
    for name, (model, loss) in steps.items():
        program = fp.compile(model, loss, fp.optim.Nesterov(0.1), remat="off", fission="off").program
        print(" | ".join([f"| {name}", *(f"{bound(program, share):,.0f}" for share in SHARES)]) + " |", flush=True)


if __name__ == "__main__":
    main()
