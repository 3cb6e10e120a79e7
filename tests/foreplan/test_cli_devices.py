"""The command about cards."""

from __future__ import annotations

import pytest

from foreplan.errors import TargetError
from foreplan.gpu import capture
from foreplan.gpu.device import device_named, devices
from tests.foreplan.shell import answer, foreplan


def test_every_card_is_listed() -> None:
    listed = {each["name"]: each for each in answer("devices")}
    assert set(listed) == set(devices())
    h100 = listed["h100"]
    assert h100["multiprocessors"] == 132 and h100["flops_per_second"]["bfloat16"] == 989_400_000_000_000
    lines = foreplan("devices").stdout.splitlines()
    assert len(lines) == 1 + len(listed) and {line.split()[0] for line in lines[1:]} == set(listed)
    assert any("rtx4090" in line and "23.52 GiB" in line and "1.01 TB/s" in line for line in lines)


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
