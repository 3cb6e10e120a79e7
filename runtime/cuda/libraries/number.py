"""Which of the cards in this machine a process works on."""

from __future__ import annotations

import os
from typing import Any

from foreplan.base.errors import TargetError
from foreplan.runtime.launchers import launch_of


def own_number(runtime: Any) -> int:
    """The number of the card of this process: that of the process among those of a job on this machine. Where it sees
    one card alone, it takes that.

    Args:
        runtime: CuPy's module of that name.

    Raises:
        TargetError: there are fewer cards.
    """
    launch = launch_of(os.environ)
    if launch is None or not launch.local:
        return 0
    count: int = runtime.getDeviceCount()
    if launch.local >= count > 1:
        raise TargetError(
            f"this is process {launch.local + 1} of a job on this machine, which has {count} cards: start at most as "
            "many processes on a machine as it has, or let them see more (CUDA_VISIBLE_DEVICES)"
        )
    return launch.local if count > 1 else 0
