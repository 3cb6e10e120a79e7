"""Every kernel that a case has, on the card in this machine: ours, cuBLASLt's calls and plans of cuDNN's, by the same
rules as where they run on this processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from foreplan.runtime.cuda.libraries.capture import captured
from foreplan.runtime.cuda.table import kernels_for
from tests.gpu import check
from tests.gpu.on_card import CardBound, opened_or_skipped
from tests.sweep.case import Case
from tests.sweep.judges import cuda


def require() -> None:
    """Skip where there is no card."""
    opened_or_skipped()


def judge(case: Case, chosen: Iterable[cuda.Lying]) -> int:
    """As where they run on this processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "Bound", CardBound)
        return cuda.judge(case, chosen)


def kernels(case: Case) -> Iterator[cuda.Lying]:
    """All kernels, those of libraries too."""
    for reads, writes in cuda.lying(case):
        for name, kernel in kernels_for(case.op, reads, writes, captured()).items():
            yield reads, writes, name, kernel
