"""Device profiles: their figures agree with one another and with what is published, and bad ones are refused."""

from __future__ import annotations

import dataclasses
import sys
from importlib.resources import files

import pytest

from foreplan.base.errors import TargetError, UsageError
from foreplan.runtime.cuda.device import PRECISIONS, Device, device_named, devices, read_device
from foreplan.runtime.cuda.libraries.capture import captured, device_from, peaks_of

# CUDA C++ Programming Guide, technical specifications: threads, blocks, KiB of shared memory, KiB of a block's.
LIMITS = {
    "7.5": (1024, 16, 64, 64),
    "8.0": (2048, 32, 164, 163),
    "8.6": (1536, 16, 100, 99),
    "8.9": (1536, 24, 100, 99),
    "9.0": (2048, 32, 228, 227),
    "10.0": (2048, 32, 228, 227),
    "12.0": (1536, 24, 100, 99),
}
# What `deviceQuery` prints of an H100, by cudaDeviceAttr: kHz, bits, bytes.
H100 = {13: 1_980_000, 16: 132, 36: 2_619_000, 37: 5120, 38: 52_428_800, 39: 2048, 75: 9, 76: 0, 81: 233_472,
        97: 232_448, 106: 32}  # fmt: skip


def every_device() -> list[Device]:
    return list(devices().values())


def test_the_cards_that_were_promised() -> None:
    assert {"h100", "h200", "b200", "a100", "l4", "rtx4090"} <= set(devices())
    h100 = device_named("H100")
    assert (h100.capability, h100.compute, h100.multiprocessors) == ("9.0", 90, 132)
    # 5,120 bits at 5.238 Gbit/s each; the driver hides about 1 GiB of 80.
    assert h100.bytes_per_second == 3_352_000_000_000 and 79 << 30 < h100.memory_bytes < 80 << 30


@pytest.mark.parametrize("device", every_device(), ids=lambda device: device.name)
def test_figures_agree_with_one_another(device: Device) -> None:
    computed = dict(peaks_of(device.title, device.compute, device.multiprocessors, device.clock_hz))
    assert set(computed) == set(dict(device.peaks)) <= set(PRECISIONS)
    for name, rate in device.peaks:
        # Papers round, and some take a clock below the highest.
        assert 0.9 < rate / computed[name] < 1.1, f"{name}: by clock and multiprocessors {computed[name]:.3g}"
    assert device.flops_per_second == dict(device.peaks)["float32"]
    # Whole words of 64 bits to a memory chip or stack, twice a clock.
    bits = 8 * device.bytes_per_second / (2 * device.memory_clock_hz)
    assert round(bits / 64) * 64 == pytest.approx(bits, rel=0.01), "bytes_per_second or memory_clock_hz is wrong"
    assert device.capability in LIMITS, "add its capability to LIMITS, from the CUDA C++ Programming Guide"
    threads, blocks, shared, of_block = LIMITS[device.capability]
    assert (device.threads_per_multiprocessor, device.blocks_per_multiprocessor) == (threads, blocks)
    assert (device.shared_bytes_per_multiprocessor, device.shared_bytes_per_block) == (shared << 10, of_block << 10)
    assert device.sources


@pytest.mark.parametrize("device", every_device(), ids=lambda device: device.name)
def test_a_profile_is_read_back_as_it_was_written(device: Device) -> None:
    assert read_device(device.as_toml(), "here") == device
    odd = dataclasses.replace(device, title='a "card" \\ of one’s own')
    assert read_device(odd.as_toml(), "here") == odd


def test_a_precision_that_a_card_lacks_is_done_in_float32() -> None:
    t4 = device_named("t4")
    assert t4.peak("bfloat16") == t4.peak("tensorfloat32") == t4.flops_per_second < t4.peak("float16")


def test_an_unknown_card_is_told_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean h100") as told:
        device_named("h1000")
    assert all(name in str(told.value) for name in devices())
    with pytest.raises(UsageError, match="cannot read"):
        device_named("nowhere/card.toml")
    with pytest.raises(UsageError, match="cannot read"):
        device_named("zero\0byte.toml")


@pytest.mark.parametrize(
    ("title", "bus", "link"),
    [
        ("NVIDIA L4", 32_000_000_000, "pcie4"),
        ("NVIDIA GeForce RTX 5090", 64_000_000_000, "pcie5-host"),
        ("Tesla T4", 16_000_000_000, "pcie3"),
        ("a slow card", 4_000_000_000, "pcie3"),
    ],
)
def test_a_profile_without_a_link_has_that_of_its_bus(title: str, bus: int, link: str) -> None:
    card = dataclasses.replace(device_named("l4"), title=title, bus_bytes_per_second=bus, link="nvlink3", per_node=4)
    text = card.as_toml().replace('link = "nvlink3"\n', "").replace("per_node = 4\n", "")
    assert read_device(text, "here") == dataclasses.replace(card, link=link, per_node=8)


def test_a_profile_may_have_a_link_of_its_own() -> None:
    card = dataclasses.replace(device_named("l4"), link="100GB/s,2us")
    assert read_device(card.as_toml(), "here") == card


def test_a_profile_of_ones_own(tmp_path) -> None:
    mine = dataclasses.replace(device_named("l4"), name="mine", multiprocessors=57)
    path = tmp_path / "mine.toml"
    path.write_text(mine.as_toml())
    assert device_named(str(path)) == mine


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("multiprocessors = 132", "", "needs multiprocessors"),
        ("multiprocessors = 132", "multiprocessors = 0", "above 0"),
        ("multiprocessors = 132", "multiprocessors = true", "above 0"),
        ("multiprocessors = 132", 'multiprocessors = "132"', "above 0"),
        ('capability = "9.0"', 'capability = "9"', "compute capability"),
        ('capability = "9.0"', "capability = 9.0", "needs capability as a text"),
        ("float32 = 66_900_000_000_000", "", "needs a table flops_per_second"),
        ("float32 = 66_900_000_000_000", "float32 = 66.9", "no whole numbers"),
        ("[flops_per_second]", "[flops_per_hour]", "unknown key 'flops_per_hour'"),
        ('link = "nvlink4"', 'link = "nvlnk4"', "did you mean nvlink4"),
        ('link = "nvlink4"', "link = 4", "card.toml: a link is one of nvlink3"),
        ("per_node = 8", "per_node = 0", "needs per_node"),
        ("per_node = 8", "per_node = 8.0", "needs per_node"),
        ("name =", "name", "no device profile"),
        ("name =", f"deep = {'[' * 3000}\nname =", "no device profile"),
        ("multiprocessors = 132", f"multiprocessors = {'9' * 5000}", "no device profile"),
        ("multiprocessors = 132", f"multiprocessors = {2**62}", "below 2"),
        ("float32 = 66_900_000_000_000", f"float32 = {2**62}", "below 2"),
        ('capability = "9.0"', f'capability = "{"9" * 5000}.0"', "compute capability"),
    ],
)
def test_a_broken_profile_is_refused(old: str, new: str, told: str) -> None:
    text = (files("foreplan.runtime.cuda") / "devices" / "h100.toml").read_text()
    assert text.count(old)
    with pytest.raises(TargetError, match=told):
        read_device(text.replace(old, new, 1), "card.toml")


def test_what_a_driver_says_makes_a_profile() -> None:
    found = device_from(H100.__getitem__, "NVIDIA H100 80GB HBM3", 85_017_755_648)
    known = device_named("h100")
    assert found.name == "h100-80gb-hbm3"
    for field in dataclasses.fields(Device):
        if field.name not in ("name", "peaks", "sources", "bytes_per_second", "link"):
            assert getattr(found, field.name) == getattr(known, field.name), field.name
    assert found.bytes_per_second == pytest.approx(known.bytes_per_second, rel=1e-3)
    assert read_device(found.as_toml(), "here") == found
    assert found.link == "pcie5"  # no driver says what else joins cards


def test_no_card_to_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(TargetError, match=r"foreplan\[cuda13\]"):
        captured()
