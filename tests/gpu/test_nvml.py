"""The management library as we call it, of two cards that are not there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from foreplan.base.errors import TargetError
from foreplan.runtime.cuda.libraries import driver, nvml
from foreplan.runtime.cuda.libraries.nvml import Nvml
from tests.gpu.compiled import needs_gcc

SOURCE = Path(__file__).parent / "shim" / "nvml.cpp"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libnvidia-ml.so"
    subprocess.run(["g++", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(path), str(SOURCE)], check=True)
    monkeypatch.setattr(nvml, "FILE", str(path))


@needs_gcc
def test_what_cards_hold(library: None) -> None:
    found = Nvml()
    assert found.driver == "580.105.08" and found.titles == ["NVIDIA A", "NVIDIA B"]
    assert found.used() == [5 << 30, 123456789]
    assert [found.place_of(bus) for bus in ("0000:17:00.0", "0000:3b:00.0")] == [0, 1]
    with pytest.raises(TargetError, match="nvmlDeviceGetHandleByPciBusId_v2: Not Found"):
        found.place_of("0000:99:00.0")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "FILE", "libnvidia-ml-that-is-not-there.so.1")
    with pytest.raises(TargetError, match=r"no driver for an NVIDIA card.*that-is-not-there"):
        Nvml()
    assert driver.versions_beside("NVIDIA A") == {}


@needs_gcc
def test_versions_are_those_of_a_machine_with_the_card(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "versions", lambda found: {"driver": found.driver})
    assert driver.versions_beside("NVIDIA B") == {"driver": "580.105.08"}
    assert driver.versions_beside("NVIDIA C") == {}
