"""What an op is by simpler ones: of its own types, and in float64 against the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.graph import GraphBuilder, Op
from tests.ops.check import decomposed, type_of
from tests.sweep.bounds import complaint, expectation, widened
from tests.sweep.case import Case
from tests.sweep.table import ENTRIES, Entry, class_of


def serves(entry: Entry, name: str) -> bool:
    """Whether an op has a decomposition, beside a kernel."""
    cls = class_of(name)
    return cls.decompose is not Op.decompose and cls.compute is not Op.compute


def judge(case: Case) -> int:
    """Raise AssertionError where the decomposition gives something else than the op; 0 where there is none."""
    op, entry = case.op, ENTRIES[case.op.name]
    if not _has_one(op, case.arrays()):
        return 0
    decomposed(op, *case.arrays(), hard=False)
    arrays = widened(case.arrays())
    if not _has_one(op, arrays):
        return 1  # of narrow types alone
    found = decomposed(op, *arrays, hard=False)
    for i, (y, each) in enumerate(zip(found, expectation(op, entry.oracle, entry.rule, arrays, "numpy"), strict=True)):
        wrong = complaint(y, each)
        assert wrong is None, f"output {i} of the decomposition: {wrong}"
    return 1


def _has_one(op: Op, arrays: Sequence[np.ndarray]) -> bool:
    b = GraphBuilder()
    return op.decompose(b, [b.input(f"x{i}", type_of(x)) for i, x in enumerate(arrays)]) is not None
