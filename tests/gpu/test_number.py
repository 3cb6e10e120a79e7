"""Which of several cards a process works on."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from foreplan.base.errors import TargetError
from foreplan.runtime.cuda.libraries.capture import captured
from foreplan.runtime.cuda.libraries.driver import CupyCard
from foreplan.runtime.cuda.libraries.number import own_number
from tests.gpu.stand_in import stand_in


def started(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """By a launcher, which sets these variables."""
    monkeypatch.setattr(os, "environ", variables)


def test_each_process_of_a_job_has_a_card_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    stand_in(monkeypatch, 13000, cards=4, used=used)
    started(monkeypatch, RANK="7", WORLD_SIZE="8", LOCAL_RANK="3")
    assert CupyCard().bus == "0000:3E:00.0" and used == [3]
    started(monkeypatch, RANK="4", WORLD_SIZE="8", LOCAL_RANK="0")
    assert CupyCard().bus == "0000:3B:00.0" and used == [3]
    started(monkeypatch, RANK="4", WORLD_SIZE="8", LOCAL_RANK="4")
    with pytest.raises(TargetError, match=r"process 5 of a job on this machine, which has 4 cards: .*CUDA_VISIBLE"):
        CupyCard()
    stand_in(monkeypatch, 13000, cards=1)
    assert CupyCard().bus == "0000:3B:00.0", "the launcher lets each process see its own card"


def test_each_process_asks_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    stand_in(monkeypatch, 13000, cards=4, used=used)
    asked: list[int] = []
    runtime = sys.modules["cupy.cuda"].runtime
    monkeypatch.setattr(runtime, "deviceGetAttribute", lambda number, device: asked.append(device) or 9)
    runtime.memGetInfo = lambda: (1 << 30, 1 << 31)
    for local, wanted in ((2, [2]), (0, [])):
        started(monkeypatch, RANK="2", WORLD_SIZE="4", LOCAL_RANK=str(local))
        used.clear()
        asked.clear()
        assert captured().title == "A card"
        assert used == wanted and set(asked) == {local}


@pytest.mark.parametrize(
    ("rank", "size", "local"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ],
)
def test_a_launcher_says_which_card(monkeypatch: pytest.MonkeyPatch, rank: str, size: str, local: str) -> None:
    runtime = SimpleNamespace(getDeviceCount=lambda: 16)
    job = {"SLURM_STEP_ID": "0", rank: "9", size: "16"}
    for variables, number in ((job | {local: "1"}, 1), (job, 9), ({}, 0), ({rank: "0", size: "1"}, 0)):
        started(monkeypatch, **variables)
        assert own_number(runtime) == number
    started(monkeypatch, **job, **{local: "first"})
    with pytest.raises(TargetError, match=f"{rank}=9 and {size}=16"):
        own_number(runtime)
