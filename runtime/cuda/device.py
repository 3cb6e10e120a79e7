"""Cards that plans are made for, whether there is one in this machine or not."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from foreplan.base.calibration import MOST, read_toml
from foreplan.base.errors import TargetError, UsageError
from foreplan.base.untrusted import contents
from foreplan.lower.links import link_named

PRECISIONS = ("float32", "tensorfloat32", "bfloat16", "float16")
PER_NODE = 8  # cards; so do HGX boards, and the largest servers with PCIe


@dataclass(frozen=True)
class Device:
    """The figures of a card that planning needs. Two devices are equal if all figures are.

    Attributes:
        name: in targets, such as `h100`.
        title: as the driver calls it, such as `NVIDIA H100 80GB HBM3`.
        capability: compute capability, such as "9.0".
        multiprocessors: their number.
        memory_bytes: memory for programs, as the driver reports it.
        bytes_per_second: of streaming reads and writes of device memory together, at most.
        bus_bytes_per_second: copied between device and host memory in one direction, at most.
        l2_bytes: of the second-level cache.
        shared_bytes_per_multiprocessor: of shared memory.
        shared_bytes_per_block: of shared memory that a block gets at most, if it asks for more than is usual.
        threads_per_multiprocessor, blocks_per_multiprocessor: resident at a time, at most.
        clock_hz, memory_clock_hz: of multiprocessors and memory, at most.
        link: between such cards in one node, as `foreplan.lower.links` takes it; where a profile says nothing, the PCIe
            generation of the bus.
        per_node: how many of them a node holds; where a profile says nothing, eight.
        peaks: floating-point operations per second of dense products, a multiply-add being two, by precision: an
            entry for each of PRECISIONS that the card has. `float32` is IEEE arithmetic, without tensor cores.
        sources: where the figures come from.
    """

    name: str
    title: str
    capability: str
    multiprocessors: int
    memory_bytes: int
    bytes_per_second: int
    bus_bytes_per_second: int
    l2_bytes: int
    shared_bytes_per_multiprocessor: int
    shared_bytes_per_block: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    clock_hz: int
    memory_clock_hz: int
    link: str
    per_node: int
    peaks: tuple[tuple[str, int], ...]
    sources: tuple[str, ...] = ()

    @property
    def flops_per_second(self) -> int:
        """Of dense float32 products in IEEE arithmetic."""
        return self.peak("float32")

    @property
    def narrow(self) -> str:
        """The precision of two bytes an element that the card computes in, as `compile` calls it; bfloat16 if it has
        both; empty if it has none."""
        known = dict(self.peaks)
        return "bf16" if "bfloat16" in known else "fp16" if "float16" in known else ""

    @property
    def compute(self) -> int:
        """The compute capability as compilers write it: 90 for "9.0"."""
        major, minor = self.capability.split(".")
        return 10 * int(major) + int(minor)

    def peak(self, precision: str) -> int:
        """Floating-point operations per second of dense products; float32's for precisions that a card lacks."""
        peaks = dict(self.peaks)
        return peaks.get(precision, peaks["float32"])

    def at_work(self, parts: int) -> float:
        """The share of multiprocessors that work if each takes one of `parts` parts; at most 1."""
        return min(1.0, parts / self.multiprocessors)

    def as_json(self) -> dict[str, Any]:
        """Every figure by its name, exact."""
        figures = dataclasses.asdict(self) | {"flops_per_second": dict(self.peaks), "sources": list(self.sources)}
        del figures["peaks"]
        return figures

    def as_toml(self) -> str:
        """The text of a profile that `read_device` reads back."""
        figures = self.as_json()
        peaks = figures.pop("flops_per_second")
        lines = [f"{key} = {_toml(value)}" for key, value in figures.items()]
        rates = [f"{key} = {value:_}" for key, value in peaks.items()]
        return "\n".join([*lines, "", "[flops_per_second]  # of dense products; sums in float32", *rates, ""])


def _toml(value: str | int | list[str]) -> str:
    if isinstance(value, list):
        return "".join(["[\n", *(f"    {_toml(each)},\n" for each in value), "]"])
    return f"{value:_}" if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


_OPTIONAL = ("link", "per_node", "sources")
_FIGURES = [field for field in dataclasses.fields(Device) if field.name not in ("peaks", *_OPTIONAL)]


def read_device(text: str, origin: str) -> Device:
    """The card that a profile describes: the fields of `Device` as TOML, and a table `flops_per_second`.

    Raises:
        TargetError: the text is no profile; names its origin and the key that is missing or wrong.
    """
    found = read_toml(text, f"{origin} is no device profile")
    if unknown := sorted(set(found) - {field.name for field in _FIGURES} - {"flops_per_second", *_OPTIONAL}):
        raise TargetError(f"{origin} has an unknown key {unknown[0]!r}")
    figures: dict[str, Any] = {}
    for field in _FIGURES:
        value = found.get(field.name)
        good = isinstance(value, str) if field.type == "str" else _is_figure(value)
        if not good:
            wanted = "a text" if field.type == "str" else "a whole number above 0, and below 2^62"
            raise TargetError(f"{origin} needs {field.name} as {wanted}, and has {repr(value)[:80]}")
        figures[field.name] = value
    major, dot, minor = figures["capability"].partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal() and len(major) <= 3 and len(minor) == 1):
        raise TargetError(f"{origin} has the compute capability {figures['capability'][:40]!r}; write one such as 9.0")
    peaks, sources = found.get("flops_per_second"), found.get("sources", [])
    if not isinstance(peaks, dict) or "float32" not in peaks or not set(peaks) <= set(PRECISIONS):
        raise TargetError(
            f"{origin} needs a table flops_per_second with float32 and any of {', '.join(PRECISIONS[1:])}"
        )
    if not all(map(_is_figure, peaks.values())):
        told = repr(peaks)[:200]
        raise TargetError(f"{origin} has flops_per_second that are no whole numbers above 0, and below 2^62: {told}")
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise TargetError(f"{origin} has sources that are no list of texts")
    link = found.get("link", pcie_of(figures["title"], figures["bus_bytes_per_second"]))
    per_node = found.get("per_node", PER_NODE)
    if not _is_figure(per_node):
        raise TargetError(f"{origin} needs per_node as a whole number above 0, and has {repr(per_node)[:80]}")
    try:
        link_named(link)
    except UsageError as error:
        raise TargetError(f"{origin}: {error}") from None
    return Device(**figures, link=link, per_node=per_node, peaks=tuple(peaks.items()), sources=tuple(sources))


def pcie_of(title: str, bus_bytes_per_second: int) -> str:
    """The link of cards that have PCIe only: NVIDIA's driver lets GeForce cards copy through host memory alone."""
    found = min((3, 4, 5), key=lambda n: abs(link_named(f"pcie{n}").bytes_per_second - bus_bytes_per_second))
    return f"pcie{found}-host" if "GeForce" in title else f"pcie{found}"


def _is_figure(value: Any) -> bool:
    return type(value) is int and 0 < value < MOST


@lru_cache(maxsize=1)
def devices() -> Mapping[str, Device]:
    """Every card with a profile of its own, by name."""
    folder = importlib.resources.files("foreplan.runtime.cuda") / "devices"
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    found = [read_device(file.read_text(encoding="utf-8"), file.name) for file in files]
    return MappingProxyType({device.name: device for device in sorted(found, key=lambda device: device.name)})


def device_named(name: str) -> Device:
    """The card of this name, or the one that a profile describes (a path that ends in `.toml`).

    Raises:
        UsageError: there is no such card; lists those that there are.
        TargetError: the file is no profile.
    """
    if name.endswith(".toml"):
        try:
            text = contents(name, "TOML").decode()
        except (OSError, ValueError) as error:  # a name with a zero byte, or what is no text
            raise UsageError(f"cannot read the device profile {name!r}: {error}") from None
        return read_device(text, name)
    known = devices()
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise UsageError(
        f"there is no device {name!r}{meant}; choose one of {', '.join(known)}, or write a profile of the card in this "
        f"machine with `foreplan devices --capture -o FILE.toml` and give that file"
    )
