"""The op's own NumPy kernel: in float64 against the oracle, and in the case's types against the same, rounded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.graph import Op
from tests.kernels import expected
from tests.ops.check import decomposed
from tests.sweep.bounds import complaint, expectation, widened
from tests.sweep.case import Case
from tests.sweep.table import ENTRIES


def outputs(op: Op, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What NumPy gives."""
    composite = type(op).compute is Op.compute
    return decomposed(op, *arrays, hard=False) if composite else expected(op, arrays)


def judge(case: Case) -> int:
    """Raise AssertionError where a result is further off than it may be."""
    entry, arrays = ENTRIES[case.op.name], case.arrays()
    for name, given in (("its types", arrays), ("float64", widened(arrays))):
        if name == "float64" and all(a.dtype == b.dtype for a, b in zip(arrays, given)):
            continue
        found = outputs(case.op, given)
        wanted = expectation(case.op, entry.oracle, entry.rule, given, "numpy")
        for i, (y, each) in enumerate(zip(found, wanted, strict=True)):
            wrong = complaint(y, each)
            assert wrong is None, f"output {i} of the NumPy kernel in {name}: {wrong}"
    return 1
