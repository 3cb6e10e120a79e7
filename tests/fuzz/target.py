"""What is fuzzed: one kind of untrusted input, made from a seed, and given to foreplan as a user would."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Target:
    """One kind of untrusted input.

    Attributes:
        name: the command line's, and the folder's in `corpus`.
        draw: makes a case; a function of the generator alone, so that a seed and a number name a case.
        run: gives it to foreplan, in an empty folder. Returns or raises a `ForeplanError`; any other exception, more
            than 10 s of processor time or 1 GiB of memory is a defect.
        prepare: loads and compiles what every case needs; runs once, and its time counts for none.
        sample: how many cases take a few seconds; the tests run these.
    """

    name: str
    draw: Callable[[random.Random], bytes]
    run: Callable[[bytes, Path], None]
    prepare: Callable[[], None] = _nothing
    sample: int = 200
