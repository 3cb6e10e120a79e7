"""Inputs of other types, shapes or number than a case has: an op refuses them, or its kernel takes them and gives what
the op says. What is read from a plan file has been through nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foreplan.base.errors import ForeplanError
from foreplan.graph import TensorType, as_dtype
from tests.ops.check import type_of
from tests.sweep.case import Case
from tests.sweep.judges.numpy import outputs

MOST = 1 << 16  # elements of an input
OTHERS = {"float32": "float64", "float64": "int64", "int64": "float32", "bool": "int64"}


def judge(case: Case) -> int:
    """Raise AssertionError where an op takes what its kernel does not."""
    for types in _others(list(case.types)):
        try:
            wanted = case.op.infer(types)
        except ForeplanError:
            continue
        except (ValueError, IndexError):  # of another number
            assert len(types) != len(case.types), f"{case.op} of {types} is not told as what it is"
            continue
        if any(type.size > MOST for type in (*types, *wanted)):
            continue
        arrays = [np.zeros(type.shape, type.dtype.numpy) for type in types]
        try:
            with np.errstate(all="ignore"):
                found = outputs(case.op, arrays)
        except Exception as error:
            raise AssertionError(f"{case.op} takes {', '.join(map(str, types))}, and its kernel does not") from error
        assert [type_of(y) for y in found] == list(wanted)
    return 1


def _others(types: list[TensorType]) -> Iterator[list[TensorType]]:
    """Each by one change from what is right."""
    for i, old in enumerate(types):
        new = [old.with_dtype(as_dtype(OTHERS.get(old.dtype.name, "float32")))]
        for axis, extent in enumerate(old.shape):
            shape = [extent + 1, max(0, extent - 1)]
            new += [old.with_shape((*old.shape[:axis], n, *old.shape[axis + 1 :])) for n in shape if n != extent]
        new += [old.with_shape((*old.shape, 1)), old.with_shape((1, *old.shape)), old.with_shape(old.shape[1:])]
        yield from ([*types[:i], other, *types[i + 1 :]] for other in new if other != old)
        yield types[:i] + types[i + 1 :]
    yield [*types, *types[-1:]]
    yield [*types, TensorType(as_dtype("float32"), (2,))]
