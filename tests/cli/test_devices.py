"""The command about cards."""

from __future__ import annotations

import os

import pytest

from foreplan.base import disk_cache
from foreplan.base.calibration import Calibration
from foreplan.base.errors import TargetError
from foreplan.calibration import cards as calibrate
from foreplan.calibration import links as calibrate_links
from foreplan.calibration import processes as calibrate_process
from foreplan.lower.links import LINKS
from foreplan.runtime.cpu import tune
from foreplan.runtime.cuda.calibration import CARDS
from foreplan.runtime.cuda.device import device_named, devices
from foreplan.runtime.cuda.libraries import capture, driver, nvml
from foreplan.runtime.processes import PROCESSES, machine, versions_here
from tests.cli.shell import MODEL, answer, foreplan
from tests.cpu.check import needs_onednn


def test_every_card_is_listed() -> None:
    found = answer("devices")
    listed = {each["name"]: each for each in found["cards"]}
    assert set(listed) == set(devices())
    h100 = listed["h100"]
    assert h100["multiprocessors"] == 132 and h100["flops_per_second"]["bfloat16"] == 989_400_000_000_000
    lines = foreplan("devices").stdout.splitlines()
    cards = lines[1 : lines.index("")]
    assert len(cards) == len(listed) and {line.split()[0] for line in cards} == set(listed)
    assert any("rtx4090" in line and "23.52 GiB" in line and "1.01 TB/s" in line for line in lines)


@needs_onednn()
def test_the_processor_is_told_and_what_was_measured_of_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path)
    tune.prices.cache_clear()
    found = answer("devices")["cpu"]
    assert found["cores"] == len(os.sched_getaffinity(0)) and found["onednn"].startswith("3.")
    assert found["measured_by_threads"] == {} and "not measured yet" in foreplan("devices").stdout
    foreplan("estimate", "mlp:width=8,batch=2", "--target", "cpu:threads=1", "--tune")
    rates = answer("devices")["cpu"]["measured_by_threads"]["1"]
    assert rates["flops_per_second"] > 10**9 and rates["bytes_per_second"] > 10**8
    assert "measured with 1 thread" in foreplan("devices").stdout
    tune.prices.cache_clear()


def test_a_captured_card_is_written(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "captured", lambda: device_named("l4"))
    path = tmp_path / "mine.toml"
    foreplan("devices", "--capture", "-o", path)
    assert device_named(str(path)) == device_named("l4")
    assert foreplan("devices", "--capture").stdout == path.read_text()
    assert answer("devices", "--capture")["name"] == "l4"
    assert "ends in .toml" in foreplan("devices", "--capture", "-o", tmp_path / "mine.json", code=2).stderr


def test_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise TargetError("there is no card")

    monkeypatch.setattr(capture, "captured", none)
    assert "no card" in foreplan("devices", "--capture", code=2).stderr
    assert "--capture" in foreplan("devices", "-o", "x.toml", code=2).stderr


def measured_link(link: str) -> Calibration:
    """One that is there, and one that is not."""
    if link == "gloo":
        raise TargetError("torch is not installed")
    return Calibration(LINKS, link, {"library": "MPICH"}, dict.fromkeys(LINKS.always, 5_000))


def test_a_calibration_is_written_and_told(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"context_bytes": 545 << 20, "code_bytes": 4 << 20, "graph_bytes_per_launch": 9000}
    found = Calibration(CARDS, device_named("h100").title, {"driver": "580.105.08"}, figures)
    asked: list[object] = []

    def measured(*given: object) -> Calibration:
        asked[:] = given
        return found

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(nvml, "Nvml", lambda: "the library")
    monkeypatch.setattr(driver, "versions", lambda library: found.versions)
    monkeypatch.setattr(calibrate, "calibrate", measured)
    process = Calibration(PROCESSES, machine(), dict(versions_here()), dict.fromkeys(PROCESSES.always, 3 << 20))
    monkeypatch.setattr(calibrate_process, "calibrate_process", lambda: process)
    monkeypatch.setattr(calibrate_links, "calibrate_link", measured_link)
    told = foreplan("devices", "--calibrate").stdout
    assert asked == ["the library", driver.card, found.versions]
    assert "context_bytes = 571_473_920" in told and f"written to {tmp_path}" in told
    assert "cudnn is not installed" in told
    path = tmp_path / "foreplan" / "calibration.toml"
    first, link, answered = answer("devices", "--calibrate")
    assert link["link"] == "memory" and link["file"] == str(tmp_path / "foreplan" / "links.toml")
    assert "the link gloo was not measured: torch is not installed" in told
    assert first["machine"] == machine() and first["figures"] == process.figures
    assert first["not_installed"] == ["onednn"]
    assert first["file"] == str(tmp_path / "foreplan" / "processes.toml")
    assert "interpreter_bytes = 3_145_728" in told
    parts = {part["name"]: part for part in answer("estimate", MODEL)["outside"]}
    assert (parts["planner"]["nbytes"], parts["planner"]["basis"]) == (3 << 20, "calibrated")
    assert answered["figures"] == figures and answered["not_installed"] == ["cudnn", "cublaslt"]
    assert answered["file"] == str(path) and path.read_text().count("[[calibrated]]") == 1
    parts = {part["name"]: part for part in answer("estimate", MODEL, "--target", "cuda:h100")["outside"]}
    assert parts["context"]["nbytes"] == 545 << 20 and parts["context"]["basis"] == "calibrated"
    path.write_text("[[calibrated]]")
    for words in (["devices", "--calibrate"], ["estimate", MODEL, "--target", "cuda:h100"]):
        assert "calibration.toml" in foreplan(*words, code=2).stderr


def test_what_calibration_needs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give one of them" in foreplan("devices", "--calibrate", "--capture", code=2).stderr
    assert "--capture" in foreplan("devices", "--calibrate", "-o", "x.toml", code=2).stderr
    monkeypatch.setattr(nvml, "FILE", "libnvidia-ml-that-is-not-there.so.1")
    process = Calibration(PROCESSES, machine(), dict(versions_here()), dict.fromkeys(PROCESSES.always, 3 << 20))
    monkeypatch.setattr(calibrate_process, "calibrate_process", lambda: process)
    monkeypatch.setattr(calibrate_links, "calibrate_link", measured_link)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = foreplan("devices", "--calibrate")
    assert "no driver for an NVIDIA card" in done.stdout and "interpreter_bytes" in done.stdout
