"""A step whose weights another one finds where they lie, as an option says it."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.lower.program import Program
from foreplan.passes.ranks import Held


@dataclass(frozen=True)
class SharedWeights:
    """A step whose weights another one finds where they lie.

    Attributes:
        program: of the step; of one stage, where it has several.
        held: see `Storage`.
    """

    program: Program
    held: tuple[Held, ...] = ()
