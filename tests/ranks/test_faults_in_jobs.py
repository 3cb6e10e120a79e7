"""Jobs of processes in which one rank differs, or fails: all ranks end, say why, and the last checkpoint is whole."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.profile import pick
from tests.ranks.samples import learnable

BIN = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
LAUNCHERS = {"mpi": shutil.which("mpiexec", path=BIN), "torchrun": shutil.which("torchrun", path=BIN)}
NEEDS = {"mpi": "mpi4py", "torchrun": "torch"}
DEADLINE = pick(5, 5, 10)  # seconds; torchrun waits 30 more for one that is stopped
MOST = 60  # seconds from a fault to the end of the job
STARTING = 60  # seconds in which a job starts, however busy the machine is
MODEL = "mlp:width=16,layers=2,batch=4"
KINDS = {"": ("--optimizer", "adamw"), "parameters": ("--optimizer", "adamw", "--shard", "parameters")}
KINDS["stages"] = ("--stages", "2", "--accumulate", "2")
KINDS["tensor"] = ("--tensor", "2")


def launched(launcher: str, ranks: int, fault: str, words: Sequence[str], odd: Sequence[str] = ()) -> tuple[int, str]:
    """A command on some ranks, of which one has other words or a fault; its exit code and all that it prints."""
    start = LAUNCHERS[launcher]
    if start is None or importlib.util.find_spec(NEEDS[launcher]) is None:
        pytest.skip(f"{launcher} is not installed: pip install 'foreplan[mpi]' or torch==2.13.0")
    rest = ["tests.ranks.faulty", fault, *words, *(["--", *odd] if odd else [])]
    count = ["-n", str(ranks), sys.executable] if launcher == "mpi" else ["--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [start, *count, "-m", *rest],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        told, _ = job.communicate(timeout=STARTING + MOST)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the job has not ended in {STARTING + MOST} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, told


def words_for(data: str, out: Path, *more: str, kind: str = "", steps: str = "40") -> list[str]:
    """A training run that writes its checkpoint behind each third step."""
    own = () if "--save-every" in more else ("--save-every", "3")
    words = (
        "train",
        MODEL,
        "--target",
        "numpy",
        "--data",
        data,
        "--epochs",
        "1000000",
        "-o",
        str(out),
        *own,
        *KINDS[kind],
    )
    return [*words, "--steps", steps, "--deadline", str(DEADLINE), *more]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return learnable(tmp_path_factory.mktemp("data"))


def assert_whole(path: Path, step: int | None = None) -> None:
    """Check that a checkpoint can be read, and nothing is left beside it."""
    found = load_file(path)
    assert step is None or found["step"] == step
    assert not list(path.parent.glob(".*.tmp"))


USUAL = {("mpi", "stop", ""), ("mpi", "lr", "")}
thorough = pytest.mark.thorough


def rows(faults: Sequence[str], kinds: Sequence[str]) -> list[pytest.ParameterSet]:
    """Each fault under each launcher."""
    return [
        pytest.param(*row, marks=[] if row in USUAL else [thorough])
        for row in ((launcher, fault, kind) for launcher in LAUNCHERS for fault in faults for kind in kinds)
    ]


@pytest.mark.parametrize(
    ("launcher", "fault", "kind"),
    rows(["stop", "kill"], list(KINDS)) + rows(["sleep", "exit", "error", "full disk", "failing disk"], [""]),
)
def test_a_rank_that_fails_ends_the_job(tmp_path: Path, data: str, launcher: str, fault: str, kind: str) -> None:
    out = tmp_path / "w.safetensors"
    code, told = launched(launcher, 2, fault, words_for(data, out, kind=kind))
    assert code != 0
    said = {
        "stop": r"rank 0 has waited .* s for .*: rank 1 \(process \d+ on .*, which is stopped\) has not come",
        "sleep": r"rank 0 has waited .* s for .*: rank 1 \(process \d+ on .*\) has not come",
        "kill": r"(KILLED|[Kk]illed|signal 9|SIGKILL|-9)",
        "exit": r"(exit ?code:? ?7|CODE: 7|exitcode: 7|in vain: rank 1)",
        "error": "ValueError: an error of one rank",
        "full disk": r"cannot write .*No space left on device",
        "failing disk": r"cannot write .*Input/output error",
    }
    assert re.search(said[fault], told) or (launcher, fault, code) == ("mpi", "exit", 7), told  # which tells no more
    assert_whole(out, 6)
    assert time.time() - out.stat().st_mtime < MOST


@pytest.mark.parametrize(("launcher", "fault", "kind"), rows(["terminate", "interrupt"], ["", "parameters", "stages"]))
def test_a_signal_to_one_rank_ends_all_behind_a_step(
    tmp_path: Path, data: str, launcher: str, fault: str, kind: str
) -> None:
    """With the checkpoint of that step."""
    out = tmp_path / "w.safetensors"
    code, told = launched(launcher, 2, fault, words_for(data, out, kind=kind))
    assert code != 0 and "interrupted; step 8 is in" in told, told
    assert_whole(out, 8)


@pytest.mark.parametrize(("launcher", "fault", "kind"), rows(["never starts", "fails to start"], [""]))
def test_a_rank_that_does_not_start(tmp_path: Path, data: str, launcher: str, fault: str, kind: str) -> None:
    out = tmp_path / "w.safetensors"
    code, told = launched(launcher, 2, fault, words_for(data, out))
    assert code != 0 and not out.exists()
    if fault == "never starts":
        assert re.search(r"rank 0 of 2 ranks .* has waited .* for others to start|cannot connect them", told), told


def changed(path: Path, out: Path) -> Path:
    """A copy of a checkpoint in which one number is another."""
    tensors = load_file(path)
    name = next(name for name, array in tensors.items() if array.dtype == np.float32)
    tensors[name] = tensors[name] + np.float32(1)
    save_file(tensors, out)
    return out


DIFFERENCES = {
    "lr": ((), ("--lr", "0.5"), r"--lr is 0.01 on rank 0, and 0.5 on rank 1"),
    "steps": ((), ("--steps", "50"), r"--steps is 40 on rank 0, and 50 on rank 1"),
    "save-every": ((), ("--save-every", "4"), r"--save-every is 3 on rank 0, and 4 on rank 1"),
    "validation": ((), ("--validation", "{data}"), r"--validation is nothing on rank 0, and a file on rank 1"),
    "seed": ((), ("--seed", "5"), r"--seed is 0 on rank 0, and 5 on rank 1"),
    "other data": ((), ("--data", "{other}"), r"the checksum of 'x' is \w+ on rank 0, and \w+ on rank 1"),
    "fewer data": (
        (),
        ("--data", "{fewer}"),
        r"the type of 'x' is float32\[48, 784\] on rank 0, and .*\[24",
    ),
    "no data": ((), ("--data", "nowhere.npz"), r"rank 1 failed: cannot read 'nowhere.npz'"),
    "other steps": (
        ("--resume", "{at4}"),
        ("--resume", "{at8}"),
        r"the number of steps is 4 on rank 0, and 8 on rank 1",
    ),
    "other content": (("--resume", "{at4}"), ("--resume", "{other4}"), r"the checksum of '.*' is \w+ on rank 0, and"),
    "cut off": (("--resume", "{at4}"), ("--resume", "{cut}"), r"rank 1 failed: '.*cut' is not a checkpoint"),
    "no checkpoint": (("--resume", "{at4}"), (), r"--resume is a file on rank 0, and nothing on rank 1"),
}


@pytest.mark.parametrize(
    ("launcher", "name", "kind"), rows(list(DIFFERENCES), [""]) + rows(["other steps"], ["stages"])
)
def test_a_difference_ends_the_job(tmp_path: Path, data: str, launcher: str, name: str, kind: str) -> None:
    common, odd, said = DIFFERENCES[name]
    arrays, rng = np.load(data), np.random.default_rng(5)
    files = {each: tmp_path / each for each in ("other", "fewer", "at4", "at8", "other4", "cut")}
    np.savez(files["other"], x=rng.standard_normal(arrays["x"].shape, np.float32), target=arrays["target"])
    np.savez(files["fewer"], **{each: arrays[each][:24] for each in arrays.files})
    paths = {each: str(path) for each, path in files.items()} | {"data": data}
    paths |= {each: f"{paths[each]}.npz" for each in ("other", "fewer")}
    if "--resume" in common:
        for each, steps in (("at4", "4"), ("at8", "8")):
            code, told = launched("mpi", 2, "none", words_for(data, files[each], kind=kind, steps=steps))
            assert code == 0, told
        changed(files["at4"], files["other4"])
        files["cut"].write_bytes(files["at4"].read_bytes()[:-50])
    out = tmp_path / "w.safetensors"
    own, others = ([word.format(**paths) for word in words] for words in (common, odd))
    words = words_for(data, out, *own, kind=kind)
    code, told = launched(launcher, 2, "none", words, [*words, *others] if others else words_for(data, out))
    assert code != 0 and re.search(said, told), told
    assert told.count("error: ranks differ") <= 1 and "Traceback (most" not in told.partition("torch")[0], told
    assert not out.exists()
