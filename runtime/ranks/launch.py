"""The world that a thread is in: mostly that of the launcher which started the process, as its environment tells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from foreplan.errors import TargetError
from foreplan.runtime.ranks.world import ALONE, World

# Who sets which variables: (rank, size). MPICH's mpiexec sets those that Intel MPI and MVAPICH set, too.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
    ("torchrun", "RANK", "WORLD_SIZE"),
)
INSTALL = "pip install 'foreplan[mpi]' brings mpi4py, an MPI library and its launcher"


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        launcher: its name, for people.
        rank: of this process.
        size: the number of processes.
    """

    launcher: str
    rank: int
    size: int


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """The launcher that an environment tells of; None: none, or it started one process.

    Raises:
        TargetError: its variables contradict one another.
    """
    for launcher, rank, size in _LAUNCHERS:
        if rank not in environment or size not in environment:
            continue
        if launcher == "srun" and "SLURM_STEP_ID" not in environment:  # a batch script, before any srun
            continue
        try:
            found = Launch(launcher, int(environment[rank]), int(environment[size]))
        except ValueError:
            found = Launch(launcher, 0, 0)
        if not 0 <= found.rank < found.size:
            raise TargetError(
                f"{launcher} says {rank}={environment[rank]} and {size}={environment[size]}, which is no rank of a "
                "job: start all processes by one launcher, or unset both"
            )
        return found if found.size > 1 else None
    return None


@lru_cache(maxsize=1)
def launched() -> World:
    """The world of the launcher that started this process.

    Raises:
        TargetError: several processes were started, and mpi4py is missing, or knows of another number.
    """
    found = launch_of(os.environ)
    if found is None:
        return ALONE
    try:
        from foreplan.runtime.ranks.mpi import Mpi
    except ImportError as error:
        raise TargetError(
            f"{found.launcher} started {found.size} processes, and mpi4py, which moves bytes between them, cannot be "
            f"loaded ({error}): {INSTALL}"
        ) from None
    world = Mpi()
    if world.size != found.size:
        raise TargetError(
            f"{found.launcher} started {found.size} processes, and {world.name}, which mpi4py uses, sees {world.size}: "
            f"start them by the launcher of that library; {INSTALL}"
        )
    return world


_in_use: ContextVar[World | None] = ContextVar("world", default=None)


def current() -> World:
    """The world of this thread: that of `using`, or else of the launcher that started this process.

    Raises:
        TargetError: a launcher started several processes, and what moves bytes between them is missing or does not fit.
    """
    return _in_use.get() or launched()


@contextmanager
def using(world: World) -> Iterator[None]:
    """Let this thread be a rank of a world until the block ends."""
    token = _in_use.set(world)
    try:
        yield
    finally:
        _in_use.reset(token)
