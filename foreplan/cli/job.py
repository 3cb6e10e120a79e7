"""The ranks that a launcher has started a command on: what they agree on, and how they end together."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from foreplan.cli.options import Settings, given, is_plan_file
from foreplan.errors import ForeplanError, TargetError, UsageError

if TYPE_CHECKING:
    from foreplan.compiled import Compiled
    from foreplan.runtime.ranks import World

_PATIENCE = 2.0  # seconds in which the first rank may tell what all have found


def with_ranks(model: str, settings: Settings, world: World) -> Settings:
    """The settings for as many ranks as a launcher has started, where nothing else is said. Ranks of one machine share
    its cores.

    Raises:
        UsageError: another number is asked for.
    """
    asked = settings.step.ranks if given("ranks") else world.size
    if asked != world.size:
        raise UsageError(
            f"--ranks {asked}, and {world.size} process{'es run' if world.size > 1 else ' runs'} this command: start "
            f"them by a launcher (mpirun -n {asked} foreplan train …), and leave --ranks out"
        )
    if world.size == 1 or is_plan_file(model):
        return settings
    step = replace(settings.step, ranks=world.size)
    if str(step.target) in ("auto", "cpu") and world.neighbours > 1:
        from foreplan.lower.targets import resolved

        if resolved(str(step.target)) == "cpu":
            cores = len(os.sched_getaffinity(0))
            step = replace(step, target=f"cpu:threads={max(1, cores // world.neighbours)}")
    return replace(settings, step=step)


def check_ranks(model: str, compiled: Compiled, world: World) -> None:
    """Check that a step is for as many ranks as there are.

    Raises:
        UsageError: it is not.
    """
    ranks = compiled.program.ranks
    if ranks != world.size:
        raise UsageError(
            f"{model!r} is a plan for {ranks} rank{'s' * (ranks > 1)}, and {world.size} run: start {ranks} "
            f"(mpirun -n {ranks} foreplan train …)"
        )


def rank_of_job() -> int:
    """This rank, as the launcher's environment says; 0 where there is none."""
    from foreplan.runtime.ranks.launch import launch_of

    try:
        found = launch_of(os.environ)
    except TargetError:
        return 0
    return 0 if found is None else found.rank


def end_job(code: int) -> None:
    """End all ranks of a job, if there are others: they would wait for this one."""
    mpi = sys.modules.get("foreplan.runtime.ranks.mpi")
    if mpi is None:
        return
    from foreplan.runtime.ranks import current

    sys.stdout.flush()
    sys.stderr.flush()
    try:
        current().abort(code)
    except ForeplanError:
        return


def wait_for_the_first() -> str:
    """What an error of this rank begins with. The first rank tells its own, which mostly is the same, at once and ends
    the job; others wait a little before.
    """
    rank = rank_of_job()
    if rank == 0:
        return ""
    time.sleep(_PATIENCE)
    return f"rank {rank}: "
