"""What can only be seen on two cards: ranks that exchange by NCCL. `make gpu-check` runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreplan import compile, losses, optim
from foreplan.models import build
from foreplan.runtime.cuda.libraries.driver import CupyCard
from tests.gpu.on_card import opened_or_skipped
from tests.gpu.on_cards import MICRO_BATCHES, STAGED, STEPS, micro_batches
from tests.ranks.training import trained

CARD = opened_or_skipped()
pytestmark = pytest.mark.cuda
RANKS = 2


@pytest.fixture(scope="module")
def launcher() -> list[str]:
    """What starts two processes."""
    assert isinstance(CARD, CupyCard)
    if (cards := CARD.cuda.runtime.getDeviceCount()) < RANKS:
        pytest.skip(f"needs two cards in one machine, and this one has {cards}")
    nccl = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed")
    if not nccl.available:
        pytest.skip("NCCL is not installed: pip install 'foreplan[cuda13]' or 'foreplan[cuda12]'")
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'foreplan[mpi]'")
    found = shutil.which("mpiexec", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if found is None:
        pytest.skip("no MPI launcher is installed: pip install 'foreplan[mpi]'")
    return [found, "-n", str(RANKS), sys.executable, "-m", "tests.gpu.on_cards"]


def told(launcher: list[str], *words: str) -> Any:
    """What each process of a job of two finds."""
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_collectives_give_what_they_give_on_the_host(launcher: list[str]) -> None:
    assert told(launcher, "collectives") == [[]] * RANKS


@pytest.mark.parametrize("shard", ["none", "state", "gradients", "parameters"])
def test_ranks_train_as_one_process(launcher: list[str], shard: str) -> None:
    """Captured, call by call, and traced: the same bits, and near what one process comes to on the host."""
    found, other = told(launcher, "training", shard)
    first, *others = found["losses"].values()
    assert others == [first] * 3 and found["alike"] and other == found

    def mlp(batch: int) -> Any:
        return build(f"mlp:width=512,layers=3,batch={batch}")

    (alone,) = trained(mlp, optim.AdamW(0.001), 1, 16 * RANKS, steps=STEPS, loss=losses.cross_entropy)
    np.testing.assert_allclose(first, alone.losses, rtol=1e-3)


def test_stages_train_as_one_process(launcher: list[str]) -> None:
    """One stage on each card: messages by NCCL."""
    found, other = told(launcher, "stages")
    first, *others = found.values()
    assert others == [first] * 2 and other == found
    step = compile(build(STAGED), losses.cross_entropy, optim.Momentum(0.01), target="numpy", accumulate=MICRO_BATCHES)
    alone = step.bind(seed=1)
    np.testing.assert_allclose(first, [alone.step(batch).loss for batch in micro_batches()], rtol=1e-3)
