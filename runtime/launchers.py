"""How this process was started: what the variables of launchers say, one of which may have started another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from foreplan.base.errors import TargetError

TORCHRUN = "torchrun"
SRUN = "srun"
_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # without it, a script or a PyTorchJob has set the variables of torchrun
_NO_STEP = 0xFFFFFFF0  # from here on Slurm numbers what is no srun of the user's: batch scripts, shells of salloc


class _Variables(NamedTuple):
    """Who sets which variables; of several names for one fact, the first that is set counts."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local: tuple[str, ...]  # the rank among those of its machine


# From the inside outwards: srun may start mpiexec, which starts its helpers by srun, and any of them torchrun.
# MPICH's mpiexec sets the variables that Intel MPI, MVAPICH and Cray's PALS set, too, and so does srun --mpi=pmi2.
_LAUNCHERS = (
    _Variables(TORCHRUN, "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",)),
    _Variables("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    _Variables(
        "mpiexec",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
    ),
    # The number of tasks of a step; SLURM_NTASKS is that of the whole allocation in a shell of salloc.
    _Variables(SRUN, "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
)
# Who tells a rank, and no number of ranks, which the MPI library knows: (launcher, rank, rank on its machine).
_WITHOUT_SIZE = (("PALS", "PALS_RANKID", "PALS_LOCAL_RANKID"), ("PMIx", "PMIX_RANK", "PMIX_LOCAL_RANK"))


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        launcher: its name, for people.
        rank: of this process.
        size: the number of processes; 0: the launcher tells none, and the MPI library knows it.
        local: the rank among those of its machine; of a launcher that does not tell, the rank.
        said: the variables and what they say, for people.
    """

    launcher: str
    rank: int
    size: int
    local: int
    said: str = ""


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """The launcher that an environment tells of; None: none, or it started one process.

    Where several have started one another, the innermost that started more than one process counts. One that started a
    single process around others (`srun torchrun` on one machine, `mpiexec -n 1 torchrun`) says nothing about these.

    Raises:
        TargetError: a launcher's variables are no rank of a job, or those of two contradict one another.
    """
    told = list(_told(environment))
    found = next((launch for launch in told if launch.size > 1), None)
    if found is None:
        return None if told else _without_size(environment)
    if found.launcher == TORCHRUN and _BY_TORCHRUN not in environment:  # another's numbers, by hand: it may move bytes
        meets = "MASTER_ADDR" in environment and "MASTER_PORT" in environment
        alike = [each for each in told[1:] if (each.rank, each.size) == (found.rank, found.size)]
        found = next((each for each in alike if each.launcher != SRUN or not meets), found)
    for other in told:
        if not _goes_with(found, other, told, environment):
            raise TargetError(
                f"{found.said}, and {other.said}: these are two jobs. Start all processes by one launcher, or by one "
                f"torchrun on each machine (--nnodes {other.size if found.launcher == TORCHRUN else found.size}); or "
                "unset the variables of the one that does not count"
            )
    return found


def _goes_with(found: Launch, other: Launch, told: list[Launch], environment: Mapping[str, str]) -> bool:
    """Whether what another launcher tells can be so beside the one that counts."""
    if (other.rank, other.size) == (found.rank, found.size):
        return True
    if other.size == 1:  # outside it did nothing; inside it made a job of each process
        return told.index(other) > told.index(found) or (other.launcher == TORCHRUN and _BY_TORCHRUN not in environment)
    if found.launcher == TORCHRUN and _BY_TORCHRUN in environment:
        return environment.get("GROUP_WORLD_SIZE") == str(other.size)  # it started one torchrun on each machine
    # mpiexec and mpirun start helpers on machines by srun, whose number these are.
    return other.launcher == SRUN and found.launcher != TORCHRUN


def _told(environment: Mapping[str, str]) -> Iterator[Launch]:
    """What each launcher tells that does, from the inside outwards."""
    for launcher, rank, sizes, locals_ in _LAUNCHERS:
        size = next((name for name in sizes if name in environment), None)
        if rank not in environment or size is None or (launcher == SRUN and not _in_step(environment)):
            continue
        said = f"{launcher} says {rank}={environment[rank]} and {size}={environment[size]}"
        local = next((name for name in locals_ if name in environment), rank)
        try:
            found = Launch(launcher, int(environment[rank]), int(environment[size]), int(environment[local]), said)
        except ValueError:
            found = Launch(launcher, 0, 0, 0)
        if not 0 <= found.rank < found.size or found.local < 0:
            raise TargetError(f"{said}, which is no rank of a job: start all processes by one launcher, or unset both")
        yield found


def _in_step(environment: Mapping[str, str]) -> bool:
    """Whether a process was started by an srun of the user's own."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _NO_STEP


def _without_size(environment: Mapping[str, str]) -> Launch | None:
    """A launcher that tells a rank alone."""
    for launcher, rank, local in _WITHOUT_SIZE:
        if environment.get(rank, "").isdigit():
            own = int(environment[rank])
            here = environment.get(local, "")
            return Launch(launcher, own, 0, int(here) if here.isdigit() else own, f"{launcher} says {rank}={own}")
    return None
