"""How much the tests do: little (`make test-fast`), what every change needs (`make test`), or all (`make test-all`).

The environment says which, as FOREPLAN_TESTS=fast, usual or all; without it, `usual`. Tests that are marked `slow` run
from `usual` on, those that are marked `thorough` in `all` alone.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import TypeVar

Amount = TypeVar("Amount")


class Profile(IntEnum):
    """One amount of testing."""

    FAST = 0
    USUAL = 1
    ALL = 2


PROFILE = Profile[os.environ.get("FOREPLAN_TESTS", "usual").upper()]


def pick(fast: Amount, usual: Amount, everything: Amount) -> Amount:
    """What the profile asks for, such as a number of drawn cases."""
    return (fast, usual, everything)[PROFILE]
