"""One part of the memory that a process holds outside the arena of a step, with its basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Basis = Literal["exact", "calibrated", "assumed"]
REST = "rest of the arena's last page"  # the name of the part that makes an arena whole pages


@dataclass(frozen=True)
class Part:
    """Bytes outside the arena, of a card's memory or, for a target on the host, of the process's.

    Attributes:
        name: what holds them.
        nbytes: how many.
        basis: `exact`; `calibrated`, measured on this card or machine with these versions; or `assumed`.
        source: where the figure comes from, for people.
    """

    name: str
    nbytes: int
    basis: Basis
    source: str
