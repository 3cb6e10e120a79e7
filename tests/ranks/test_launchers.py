"""Which job a process belongs to, as the variables of launchers say that may have started one another."""

from __future__ import annotations

import itertools

import pytest

from foreplan.base.errors import TargetError
from foreplan.runtime.launchers import Launch, launch_of

Environment = dict[str, str]


def mpich(rank: int, size: int) -> Environment:
    return {"PMI_RANK": f"{rank}", "PMI_SIZE": f"{size}", "PMI_FD": "9", "MPI_LOCALRANKID": f"{rank}"}


def open_mpi(rank: int, size: int) -> Environment:
    own = {"OMPI_COMM_WORLD_RANK": f"{rank}", "OMPI_COMM_WORLD_SIZE": f"{size}", "PMIX_RANK": f"{rank}"}
    return own | {"OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}"}


def pals(rank: int, size: int) -> Environment:
    return {"PMI_RANK": f"{rank}", "PMI_SIZE": f"{size}", "PALS_RANKID": f"{rank}", "PALS_LOCAL_RANKID": f"{rank % 4}"}


def allocation(tasks: int) -> Environment:
    """A shell of salloc."""
    return {"SLURM_JOB_ID": "7", "SLURM_NTASKS": f"{tasks}", "SLURM_NPROCS": f"{tasks}"}


def interactive_step(tasks: int) -> Environment:
    """The same, where the cluster runs it on a node of the allocation."""
    own = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    return allocation(tasks) | own


def batch_script(tasks: int) -> Environment:
    return allocation(tasks) | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def srun(rank: int, size: int, of_allocation: int | None = None) -> Environment:
    own = {"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}", "SLURM_STEP_ID": "0"}
    return allocation(of_allocation or size) | own | {"SLURM_STEP_NUM_TASKS": f"{size}"}


def srun_pmi2(rank: int, size: int) -> Environment:
    return srun(rank, size) | {"PMI_RANK": f"{rank}", "PMI_SIZE": f"{size}", "PMI_FD": "9"}


def srun_pmix(rank: int, size: int) -> Environment:
    return srun(rank, size) | {"PMIX_RANK": f"{rank}", "PMIX_NAMESPACE": "slurm.pmix.7.0"}


def by_hand(rank: int, size: int) -> Environment:
    """As a PyTorchJob has it, or a script."""
    return {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def torchrun(rank: int, size: int, machines: int = 1) -> Environment:
    own = {"LOCAL_RANK": f"{rank % (size // machines)}", "LOCAL_WORLD_SIZE": f"{size // machines}"}
    groups = {"GROUP_RANK": f"{rank // (size // machines)}", "GROUP_WORLD_SIZE": f"{machines}"}
    return by_hand(rank, size) | own | groups | {"TORCHELASTIC_RUN_ID": "none"}


OUTER = (mpich, open_mpi, pals, srun, srun_pmi2, srun_pmix)


@pytest.mark.parametrize(
    ("environment", "launcher", "place"),
    [
        (mpich(2, 4), "mpiexec", (2, 4, 2)),
        (open_mpi(1, 3), "Open MPI's mpirun", (1, 3, 1)),
        (pals(6, 8), "mpiexec", (6, 8, 2)),
        (srun(3, 4), "srun", (3, 4, 3)),
        (srun(1, 2, of_allocation=16), "srun", (1, 2, 1)),
        (srun_pmi2(3, 4), "mpiexec", (3, 4, 3)),
        (srun_pmix(3, 4), "srun", (3, 4, 3)),
        (torchrun(5, 8, machines=2), "torchrun", (5, 8, 1)),
        (by_hand(1, 2), "torchrun", (1, 2, 1)),
        # One that set another up by its own numbers: whoever moves the bytes.
        (srun(1, 4) | by_hand(1, 4), "torchrun", (1, 4, 1)),
        (srun_pmi2(1, 4) | by_hand(1, 4), "mpiexec", (1, 4, 1)),
        (mpich(1, 4) | {"RANK": "1", "WORLD_SIZE": "4"}, "mpiexec", (1, 4, 1)),
        # mpiexec on machines of an allocation: its helpers are tasks of srun.
        (srun(1, 2) | mpich(9, 16), "mpiexec", (9, 16, 9)),
        (srun(0, 3) | open_mpi(1, 2), "Open MPI's mpirun", (1, 2, 1)),
        # One torchrun on each machine.
        (srun(1, 2) | torchrun(5, 8, machines=2), "torchrun", (5, 8, 1)),
        (mpich(0, 2) | torchrun(5, 8, machines=2), "torchrun", (5, 8, 1)),
        # What is left from elsewhere.
        (allocation(8) | torchrun(1, 2), "torchrun", (1, 2, 1)),
        (interactive_step(8) | torchrun(1, 2), "torchrun", (1, 2, 1)),
        (batch_script(8) | mpich(1, 2), "mpiexec", (1, 2, 1)),
        (mpich(1, 2) | {"RANK": "0", "WORLD_SIZE": "1"}, "mpiexec", (1, 2, 1)),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun"}, "PMIx", (3, 0, 3)),
        ({"PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2"}, "PALS", (6, 0, 2)),
    ],
)
def test_the_innermost_launcher_counts(environment: Environment, launcher: str, place: tuple[int, int, int]) -> None:
    found = launch_of(environment)
    assert found is not None and found.launcher == launcher
    assert (found.rank, found.size, found.local) == place


@pytest.mark.parametrize("inner", [torchrun, by_hand])
@pytest.mark.parametrize("outer", OUTER)
def test_a_single_process_around_torchrun_says_nothing(outer: object, inner: object) -> None:
    """`srun torchrun` on one machine, `mpiexec -n 1 torchrun`."""
    assert callable(outer) and callable(inner)
    for rank in range(4):
        found = launch_of(outer(0, 1) | inner(rank, 4))
        assert found is not None and (found.launcher, found.rank, found.size) == ("torchrun", rank, 4)


@pytest.mark.parametrize(
    "environment",
    [{}, allocation(8), interactive_step(8), batch_script(8), srun(0, 1, of_allocation=8), torchrun(0, 1), mpich(0, 1)]
    + [outer(0, 1) | torchrun(0, 1) for outer in OUTER],
)
def test_one_process(environment: Environment) -> None:
    assert launch_of(environment) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (srun(1, 2) | torchrun(0, 4), ("RANK=0 and WORLD_SIZE=4", "SLURM_PROCID=1", "--nnodes 2")),
        (mpich(3, 4) | torchrun(0, 1), ("PMI_RANK=3 and PMI_SIZE=4", "RANK=0 and WORLD_SIZE=1", "--nnodes 4")),
        (open_mpi(1, 4) | by_hand(1, 2), ("OMPI_COMM_WORLD_SIZE=4", "WORLD_SIZE=2")),
        (srun(2, 4) | mpich(0, 1), ("SLURM_PROCID=2", "PMI_SIZE=1")),
        (srun(2, 4) | by_hand(1, 4), ("SLURM_PROCID=2", "RANK=1")),
        (mpich(0, 2) | torchrun(1, 6, machines=3), ("WORLD_SIZE=6", "PMI_SIZE=2")),
    ],
)
def test_two_jobs_at_a_time_are_refused(environment: Environment, said: tuple[str, ...]) -> None:
    """By an error that names both."""
    with pytest.raises(TargetError) as error:
        launch_of(environment)
    assert all(text in str(error.value) for text in said), error.value


@pytest.mark.parametrize("launcher", [*OUTER[:4], torchrun])
@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "2"), ("x", "2"), ("0", "0"), ("0", "")])
def test_what_is_no_rank_is_refused(launcher: object, rank: str, size: str) -> None:
    assert callable(launcher)
    names = {"RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}
    names |= {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}
    given = {
        name: (size if name.endswith(("SIZE", "TASKS")) else rank) if name in names else value
        for name, value in launcher(0, 1).items()
    }
    with pytest.raises(TargetError, match="no rank of a job"):
        launch_of(given)


def test_two_launchers_agree_or_are_refused() -> None:
    """Whatever two tell, inside one another: a job of more than one process that both belong to, one process where
    neither tells of more, or an error. No process of a job of several goes on alone.
    """
    launchers = (mpich, open_mpi, srun, srun_pmi2, srun_pmix, by_hand, torchrun)
    places = ((0, 1), (0, 2), (1, 2), (2, 3))
    for first, second in itertools.permutations(launchers, 2):
        if {first, second} == {by_hand, torchrun}:
            continue  # which set the same variables
        for one, other in itertools.product(places, repeat=2):
            environment = first(*one) | second(*other)
            found: Launch | str | None
            try:
                found = launch_of(environment)
            except TargetError as error:
                found = str(error)
                assert " and " in found
            if found is None:
                told = [value for name, value in environment.items() if name.endswith(("SIZE", "NUM_TASKS"))]
                assert set(told) == {"1"}, environment
