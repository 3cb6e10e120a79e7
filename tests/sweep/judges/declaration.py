"""What an op declares: its text, in place and apart, poison, guards, strides."""

from __future__ import annotations

from dataclasses import replace

from foreplan.ops.expr import infer_dtypes
from foreplan.ops.map import Map
from tests.ops.check import run_op
from tests.sweep.case import Case


def judge(case: Case) -> int:
    """Raise AssertionError where the op's kernel does not hold what its declaration says; 0 where nothing was asked."""
    if _rounds_within(case):
        return 0
    # Sums of the largest numbers are infinite in one order and not in another.
    inputs = tuple(replace(x, values="normal") if x.values == "huge" else x for x in case.inputs)
    run_op(case.op, *replace(case, inputs=inputs).arrays())
    return 1


def _rounds_within(case: Case) -> bool:
    """Whether a map has steps that are rounded more than its result: with strides, the result differs by as much."""
    if not isinstance(case.op, Map):
        return False
    types = infer_dtypes([type.dtype for type in case.types], *case.op.parsed).values()
    return len({dtype for dtype in types if dtype is not None and dtype.is_float}) > 1
