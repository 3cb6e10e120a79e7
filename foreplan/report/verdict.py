"""Whether a planned step fits its card: the whole of what the process holds there, against the card's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreplan.base.outside import Basis
from foreplan.base.units import format_bytes, in_common
from foreplan.report.memory import Memory

_DOUBT: dict[Basis, int] = {"exact": 0, "calibrated": 1, "assumed": 2}


@dataclass(frozen=True)
class Verdict:
    """Whether a step fits its device.

    Attributes:
        whole_bytes: the arena and all that lies outside it: `Memory.peak`.
        device_bytes: memory of the card; None: the step is for the host, and no target names a machine.
        assumed_bytes: those of the whole that were measured elsewhere, if at all.
        basis: of the least certain part of the whole.
        lacking: the library that the plan was made without, for people; empty: none.
    """

    whole_bytes: int
    device_bytes: int | None
    assumed_bytes: int
    basis: Basis
    lacking: str = ""

    @classmethod
    def of(cls, memory: Memory, device_bytes: int | None, lacking: str = "") -> Verdict:
        """The verdict on a planned step."""
        assumed = sum(part.nbytes for part in memory.outside if part.basis == "assumed")
        bases: list[Basis] = ["exact", *(part.basis for part in memory.outside)]
        return cls(memory.peak, device_bytes, assumed, max(bases, key=lambda basis: _DOUBT[basis]), lacking)

    @property
    def fits(self) -> bool | None:
        """Whether the whole is within the device's memory; None where that is not known."""
        return None if self.device_bytes is None else self.whole_bytes <= self.device_bytes

    def to_json(self) -> dict[str, Any]:
        """The figures, in bytes."""
        return {
            "device_bytes": self.device_bytes,
            "whole_bytes": self.whole_bytes,
            "whole_basis": self.basis,
            "fits": self.fits,
            "lacking": self.lacking,
        }

    def __str__(self) -> str:
        """`fits: 5.3 of 14.8 GiB`, or `does not fit: 24.3 of 14.8 GiB`; with what is assumed, where that decides."""
        if self.device_bytes is None:
            return f"takes {format_bytes(self.whole_bytes)}"
        text = "fits" if self.fits else "does not fit"
        text += f": {in_common(self.whole_bytes, self.device_bytes)}"
        if abs(self.device_bytes - self.whole_bytes) < self.assumed_bytes:
            text += f", of which {format_bytes(self.assumed_bytes)} outside the arena are assumed"
        return text
