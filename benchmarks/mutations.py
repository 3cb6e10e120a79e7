"""What the verifier refuses: good plans of small problems, damaged at random, executed under poison, by kind of damage.

`python -m benchmarks.mutations [SEEDS]`, in the repository's root, prints a row a kind, then what verifying costs
beside planning. A harmful mutant that is not refused ends the run with an error that shows it.
"""

from __future__ import annotations

import sys
import time

import foreplan as fp
from foreplan.planner import Problem, plan, verify
from tests.planner.campaign import campaign, table
from tests.planner.problems import training_chain

SEEDS, TRIES = 400, 5
MODELS = ("resnet50", "gpt2_small")


def lowered(name: str) -> Problem:
    loss = getattr(fp.losses, fp.models.default_loss(name))
    return fp.lower(fp.differentiate(fp.models.build(name), loss, fp.optim.Nesterov(0.1)))


def seconds(name: str, problem: Problem) -> str:
    """A row: actions, seconds to plan (which verifies as well), to verify alone, and their ratio."""
    started = time.perf_counter()
    found = plan(problem, remat="off")
    planned = time.perf_counter() - started
    started = time.perf_counter()
    verify(found, problem)
    verified = time.perf_counter() - started
    return f"| {name} | {len(problem.actions):,} | {planned:.2f} | {verified:.3f} | {verified / planned:.1%} |"


def main() -> None:
    seeds = int(sys.argv[1]) if sys.argv[1:] else SEEDS
    print(table(campaign(range(seeds), TRIES)), flush=True)
    print("\n| problem | actions | planning, s | verifying, s | share |\n|---|---|---|---|---|")
    plan(training_chain(2), remat="off")  # compiles
    for name in MODELS:
        print(seconds(f"`{name}`", lowered(name)), flush=True)
    print(seconds("chain of 1,667 layers", training_chain(1667)), flush=True)


if __name__ == "__main__":
    main()
