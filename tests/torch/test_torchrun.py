"""Ranks that torchrun has started, with PyTorch's Gloo instead of MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.samples import assert_checkpoints_close, learnable

pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")


def run(ranks: int, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A module's command on so many processes of this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [*(start if ranks > 1 else [sys.executable, "-m"]), module, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Samples that can be learned."""
    return learnable(tmp_path_factory.mktemp("data"))


def train(ranks: int, data: str, out: Path, *words: str, alike: int = 1) -> dict[str, Any]:
    """What `--json` tells of some steps of 12 samples, whatever the ranks."""
    model = f"mlp:width=32,layers=1,batch={12 * alike // ranks}"
    more = ("--data", data, "-o", str(out), "--target", "numpy", "--steps", "5", "--json")
    done = run(ranks, "foreplan", "train", model, *more, *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("ranks", "words", "alike"),
    [(2, ("--shard", "parameters"), 1), (3, (), 1), (4, ("--shard", "state", "--tensor", "2"), 2)],
)
def test_processes_of_torchrun_train_as_one(
    tmp_path: Path, data: str, ranks: int, words: tuple[str, ...], alike: int
) -> None:
    alone = train(1, data, tmp_path / "one")
    found = train(ranks, data, tmp_path / "many", *words, alike=alike)
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=2e-5)
    assert_checkpoints_close(tmp_path / "many", tmp_path / "one")


def test_stages_of_several_processes(tmp_path: Path, data: str) -> None:
    """With parameters in parts, two and two."""
    model, words = "mlp:width=32,layers=3,batch={}", ("--data", data, "--target", "numpy", "--steps", "3", "--json")
    losses = []
    for ranks, batch, more in [(1, 4, ()), (4, 2, ("--stages", "2", "--shard", "parameters"))]:
        out = ("-o", str(tmp_path / str(ranks)), "--accumulate", "3")
        done = run(ranks, "foreplan", "train", model.format(batch), *words, *out, *more)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["losses"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    assert_checkpoints_close(tmp_path / "4", tmp_path / "1")


def test_stages_send_messages() -> None:
    """From one process to another."""
    alone, several = (run(ranks, "tests.ranks.stage_of_job") for ranks in (1, 2))
    assert several.returncode == 0, several.stderr
    losses = [
        json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))[0][0]
        for done in (alone, several)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


def test_what_is_wrong_is_said_once(data: str) -> None:
    """Before what torchrun says of it."""
    done = run(2, "foreplan", "train", "mlp:batch=2", "--data", "nowhere.npz")
    assert done.returncode != 0 and done.stderr.count("error: cannot read 'nowhere.npz'") == 1
