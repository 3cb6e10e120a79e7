"""Every kernel that a case has, on the card in this machine: ours, cuBLASLt's calls and plans of cuDNN's, by the same
rules as where they run on this processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from foreplan.gpu.capture import captured
from foreplan.gpu.table import kernels_for
from tests.gpu import check
from tests.gpu.on_card import CardBound, opened_or_skipped
from tests.sweep.case import Case
from tests.sweep.judges import cuda
from tests.sweep.table import Entry


def require() -> None:
    """Skip where there is no card."""
    opened_or_skipped()


def draw(entry: Entry, rng: Random) -> Case:
    """A case for which the engine has a kernel, if it has one for any of a few draws."""
    return entry.served(rng, lambda case: any(True for _ in _kernels(case)))


def judge(case: Case) -> int:
    """Raise AssertionError where a kernel's result is further off than it may be; give how many kernels there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "Bound", CardBound)
        return cuda.judged(case, _kernels(case))


def judge_one(case: Case) -> int:
    """As `judge`, by one kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "Bound", CardBound)
        return cuda.judged(case, case.one_of(_kernels(case)))


def _kernels(case: Case) -> Iterator[cuda.Lying]:
    for reads, writes in cuda.lying(case):
        for name, kernel in kernels_for(case.op, reads, writes, captured()).items():
            yield reads, writes, name, kernel
