"""The world that a thread is in: mostly that of the launcher which started the process, as its environment tells."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType

from foreplan.errors import TargetError
from foreplan.runtime.ranks.world import ALONE, World

TORCHRUN = "torchrun"
PATIENCE = 2.0  # seconds in which all ranks come to the same end, if they do
# Who sets which variables: (rank, size, rank among those of its machine). MPICH's mpiexec sets those that Intel MPI and
# MVAPICH set, too.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    (TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK"),
)
INSTALL = "pip install 'foreplan[mpi]' brings mpi4py, an MPI library and its launcher"


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        launcher: its name, for people.
        rank: of this process.
        size: the number of processes.
        local: the rank among those of its machine; of a launcher that does not tell, the rank.
    """

    launcher: str
    rank: int
    size: int
    local: int


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """The launcher that an environment tells of; None: none, or it started one process.

    Raises:
        TargetError: its variables contradict one another.
    """
    for launcher, rank, size, local in _LAUNCHERS:
        if rank not in environment or size not in environment:
            continue
        if launcher == "srun" and "SLURM_STEP_ID" not in environment:  # a batch script, before any srun
            continue
        try:
            here = int(environment.get(local, environment[rank]))
            found = Launch(launcher, int(environment[rank]), int(environment[size]), here)
        except ValueError:
            found = Launch(launcher, 0, 0, 0)
        if not 0 <= found.rank < found.size or found.local < 0:
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
        TargetError: several processes were started, and what moves bytes between them is missing, or knows of another
            number.
    """
    found = launch_of(os.environ)
    if found is None:
        return ALONE
    world = _of_torchrun(found) if found.launcher == TORCHRUN else _of_mpi(found)
    _end_with_errors()
    return world


def _of_mpi(found: Launch) -> World:
    """The world of an MPI library."""
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
            f"start them by the launcher of that library (mpiexec -n {found.size} …), for cards too; {INSTALL}"
        )
    return world


def _of_torchrun(found: Launch) -> World:
    """The world of torchrun, where there is no MPI."""
    from foreplan.runtime.ranks.gloo import connected

    try:
        return connected()
    except ImportError as error:
        raise TargetError(
            f"torchrun started {found.size} processes, and PyTorch, which moves bytes between them, cannot be loaded "
            f"({error}): pip install 'foreplan[torch]', or start them by MPI's launcher (mpiexec -n {found.size} …)"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise TargetError(
            f"torchrun started {found.size} processes, and PyTorch cannot connect them: {str(error).splitlines()[0]}"
        ) from None


def begun() -> World | None:
    """The world of this process, if it has begun to speak with others."""
    return launched() if launched.cache_info().currsize and launched() is not ALONE else None


def end(code: int) -> None:
    """What a rank does before it ends with a code. All end by themselves where all come to their ends in `PATIENCE`;
    otherwise this one ends the others, which would wait for it.
    """
    world = begun()
    if world is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if world.meet(bytes(16), PATIENCE) is None:
        world.abort(code)


def _end_with_errors() -> None:
    """Let an error that nobody catches end all ranks, when it has been told."""
    told = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):  # a signal has reached all ranks
            end(1)

    sys.excepthook = hook


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
