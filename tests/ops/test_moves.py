"""Ops that compute refuse elements that are only stored; those that move take them, and give them back as they were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreplan.base.errors import ForeplanError, ShapeError
from foreplan.graph import Op, TensorType
from foreplan.graph.types import DTYPES
from foreplan.ops.evaluate import computed
from foreplan.ops.map import Map
from tests.profile import pick
from tests.sweep.case import Case
from tests.sweep.draws import drawn
from tests.sweep.table import ENTRIES

CODES = DTYPES["float8_e4m3fn"]
MOVING = {
    "reshape", "bitcast", "transpose", "slice", "broadcast", "stop_gradient", "straight_through", "by_mode",
    "concat", "unstack", "gather", "gather_elements",
}  # fmt: skip


def of_codes(case: Case) -> list[list[TensorType]]:
    """Its input types with codes for one input, or for all of an element type."""
    types = case.types
    found = []
    for i, type in enumerate(types):
        found.append([*types[:i], replace(type, dtype=CODES), *types[i + 1 :]])
        found.append([replace(x, dtype=CODES) if x.dtype == type.dtype else x for x in types])
    return found


def takes(op: Op, types: list[TensorType]) -> bool:
    try:
        op.result_types(types)
    except ForeplanError:
        return False
    return True


@pytest.mark.parametrize("name", ENTRIES)
def test_codes_are_moved_and_never_computed_with(name: str) -> None:
    cases = [ENTRIES[name].draw(drawn(name, 7, number)) for number in range(pick(4, 8, 30))]
    taken = [takes(case.op, types) for case in cases for types in of_codes(case)]
    assert any(taken) == any(case.op.moves for case in cases)
    assert any(taken) or name not in MOVING


def test_a_map_that_copies_moves() -> None:
    x = np.arange(6).astype(CODES.numpy)
    (same,) = computed(Map(("a0",)), [x])
    assert same.dtype == x.dtype and same.tobytes() == x.tobytes()
    with pytest.raises(ShapeError, match="are only stored"):
        computed(Map(("(a0 + a0)",)), [x])
