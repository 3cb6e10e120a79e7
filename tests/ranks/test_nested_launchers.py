"""torchrun under another launcher: its processes are one job, and not as many that train the same."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.samples import learnable

BIN = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
MPIEXEC, TORCHRUN = (shutil.which(name, path=BIN) for name in ("mpiexec", "torchrun"))
SRUN = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}
WORDS = ("-m", "foreplan", "train", "mlp:width=8,layers=1,batch=4", "--target", "numpy", "--steps", "3", "--json")

pytestmark = pytest.mark.thorough
if TORCHRUN is None or MPIEXEC is None or importlib.util.find_spec("torch") is None:
    pytest.skip("no torchrun is installed: pip install torch==2.13.0 'foreplan[mpi]'", allow_module_level=True)


def run(data: str, start: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, under launchers."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    words = [*start, *WORDS, "--data", data]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=variables)


@pytest.mark.parametrize("outer", ["srun", "srun --mpi=pmi2", "mpiexec -n 1", "a shell of salloc", "none"])
def test_torchrun_counts(tmp_path: Path, outer: str) -> None:
    """Two processes take the samples of one that takes twice as many, and print one result."""
    environment = {"none": {}, "mpiexec -n 1": {}, "a shell of salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}}
    environment |= {"srun": SRUN, "srun --mpi=pmi2": SRUN | {"PMI_RANK": "0", "PMI_SIZE": "1"}}
    start = [str(MPIEXEC), "-n", "1"] if outer == "mpiexec -n 1" else []
    data = learnable(tmp_path)
    done = run(data, [*start, str(TORCHRUN), "--nproc-per-node", "2"], **environment[outer])
    assert done.returncode == 0, done.stderr
    alone = subprocess.run(
        [sys.executable, *WORDS, "--data", data, "--batch", "8"], capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout)["losses"] == pytest.approx(json.loads(alone.stdout)["losses"], rel=1e-5)


def test_two_jobs_of_torchrun_are_refused(tmp_path: Path) -> None:
    """Which would write one checkpoint."""
    start = [str(MPIEXEC), "-n", "2", str(TORCHRUN), "--standalone", "--nproc-per-node", "2"]
    done = run(learnable(tmp_path), start)
    assert done.returncode != 0 and "losses" not in done.stdout and "these are two jobs" in done.stderr, done.stderr
