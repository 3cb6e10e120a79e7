"""What a process holds on a card besides its arena: context, libraries, code, the captured graph."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from foreplan.errors import TargetError
from foreplan.gpu.device import Device
from foreplan.units import align_up

PAGE = 2 << 20  # bytes; in which a driver gives out device memory
LIBRARIES = ("cudnn", "cublaslt")
_FIGURES = ("context_bytes", "code_bytes", *(f"{name}_bytes" for name in LIBRARIES), "graph_bytes_per_launch")


@dataclass(frozen=True)
class Part:
    """Bytes of device memory outside the arena.

    Attributes:
        name: what holds them.
        nbytes: how many.
        basis: `exact`; `calibrated`, measured on this card with these versions; or `assumed`.
        source: where the figure comes from, for people.
    """

    name: str
    nbytes: int
    basis: Literal["exact", "calibrated", "assumed"]
    source: str


@dataclass(frozen=True)
class Calibration:
    """What was measured on one card.

    Attributes:
        card: as its driver calls it.
        versions: of `driver`, `cuda`, `cudnn` and `cupy`.
        figures: bytes, by the keys of the table.
    """

    card: str
    versions: Mapping[str, str]
    figures: Mapping[str, int]


@dataclass(frozen=True)
class Table:
    """Every calibration, and what is assumed where there is none."""

    assumed: Mapping[str, int]
    calibrated: tuple[Calibration, ...] = field(default=())

    def covers(self, device: Device, versions: Mapping[str, str]) -> tuple[Calibration | None, bool]:
        """The calibration of a card, the latest, and whether it was made with these versions, as far as they are given.

        One with these versions comes before any other.
        """
        own = [each for each in self.calibrated if each.card == device.title]
        same = [each for each in own if all(each.versions.get(name) == text for name, text in versions.items())]
        best = same or own
        return best[-1] if best else None, bool(same)


def read_table(text: str, origin: str) -> Table:
    """A table of calibrations from TOML; `calibration.toml` says how it is written.

    Raises:
        TargetError: it is no such table; names its origin and what is wrong.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TargetError(f"{origin} is no table of calibrations: {error}") from None
    assumed = _figures(found.get("assumed"), f"{origin}, [assumed]", ("context_bytes_per_thread", *_FIGURES[1:]))
    entries = found.get("calibrated", [])
    if not isinstance(entries, list):
        raise TargetError(f"{origin} needs entries [[calibrated]], and has {entries!r}")
    return Table(
        assumed, tuple(_calibration(entry, f"{origin}, [[calibrated]] {i + 1}") for i, entry in enumerate(entries))
    )


def _calibration(entry: Any, where: str) -> Calibration:
    card, versions = (entry.get("card"), entry.get("versions")) if isinstance(entry, dict) else (None, None)
    if not isinstance(card, str) or not isinstance(versions, dict):
        raise TargetError(f"{where} needs a card and versions")
    if not all(isinstance(text, str) for text in versions.values()):
        raise TargetError(f"{where} has versions that are no texts: {versions}")
    return Calibration(card, MappingProxyType(versions), _figures(entry, where, _FIGURES))


def _figures(entry: Any, where: str, names: Sequence[str]) -> Mapping[str, int]:
    figures = {}
    for name in names:
        value = entry.get(name) if isinstance(entry, dict) else None
        if type(value) is not int or value < 0:
            raise TargetError(f"{where} needs {name} as a number of bytes, and has {value!r}")
        figures[name] = value
    return MappingProxyType(figures)


@lru_cache(maxsize=1)
def calibrations() -> Table:
    """The table that comes with foreplan."""
    file = importlib.resources.files("foreplan.gpu") / "calibration.toml"
    return read_table(file.read_text(encoding="utf-8"), file.name)


def outside_arena(
    device: Device,
    arena_bytes: int,
    launches: int,
    libraries: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    table: Table | None = None,
) -> tuple[Part, ...]:
    """What a session holds on a card besides its arena, so that the sum is what nvidia-smi shows.

    Args:
        device: the card.
        arena_bytes: of the arena, which takes whole pages.
        launches: of the captured step; 0 where nothing is captured.
        libraries: those of LIBRARIES that the step calls.
        versions: those that are known, of `driver`, `cuda`, `cudnn` and `cupy`.
        table: by default the one that comes with foreplan.
    """
    table = table or calibrations()
    found, same = table.covers(device, versions or {})
    if found is None:
        threads = device.multiprocessors * device.threads_per_multiprocessor
        figures = dict(table.assumed)
        figures["context_bytes"] = align_up(figures.pop("context_bytes_per_thread") * threads, PAGE)
        source = "taken from other cards and programs: this card has not been calibrated"
    else:
        figures = dict(found.figures)
        source = "measured with " + ", ".join(f"{name} {text}" for name, text in found.versions.items())
    basis: Literal["calibrated", "assumed"] = "calibrated" if same else "assumed"
    parts = [("context", figures["context_bytes"]), ("code of kernels", figures["code_bytes"])]
    parts += [(name, figures[f"{name}_bytes"]) for name in LIBRARIES if name in libraries]
    parts.append(("captured graph", align_up(figures["graph_bytes_per_launch"] * launches, PAGE)))
    rest = align_up(arena_bytes, PAGE) - arena_bytes
    return (
        Part("rest of the arena's last page", rest, "exact", "device memory is given out in pages of 2 MiB"),
        *(Part(name, nbytes, basis, source) for name, nbytes in parts),
    )
