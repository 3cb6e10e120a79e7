"""Resizing and its gradient by compiled loops: every mode, along axes of every kind, in float32 and bfloat16."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Window
from foreplan.lower.fallbacks import fallbacks
from foreplan.ops.interpolation import MODES
from foreplan.ops.resize import Resize, ResizeGrad
from foreplan.runtime.cpu.table import kernels_for
from tests.cpu.check import needs_onednn
from tests.engines.engine import Engine, in_both_types
from tests.kernels import layouts, normal
from tests.ops.check import type_of

pytestmark = needs_onednn()
# before and after
CASES = {
    "one element": ((1, 2, 1, 1), (1, 2, 2, 2)),
    "twice": ((2, 3, 5, 7), (2, 3, 10, 14)),
    "from one": ((2, 5, 1, 1), (2, 5, 6, 3)),
    "to one": ((2, 5, 6, 3), (2, 5, 1, 1)),
    "larger and smaller": ((1, 17, 5, 13), (1, 17, 11, 4)),
    "one axis of it": ((2, 33, 4, 5), (2, 33, 4, 8)),
    "lines": ((2, 3, 17), (2, 3, 29)),
    "the first axis": ((3, 4, 5), (7, 4, 5)),
    "channels too": ((2, 3, 4, 5), (2, 7, 3, 5)),
    "no other axis": ((7,), (19,)),
    "shared by threads": ((64, 3, 20, 20), (64, 3, 40, 40)),
}


@in_both_types("cpu")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_both_ways(engine: Engine, case: str, mode: str) -> None:
    before, after = CASES[case]
    for op, x in ((Resize(after, mode), normal(*before)), (ResizeGrad(after, mode, extents=before), normal(*after))):
        assert kernels_for(op, [Window.dense(type_of(x))], [Window.dense(op.infer([type_of(x)])[0])], 2)
        engine.check_lying(op, x, ways=layouts(x))


def test_the_nearest_element_is_taken_as_it_is() -> None:
    given = np.array([[-0.0, np.inf, -np.inf, np.nan]], np.float32)
    graph = fp.trace(lambda x: {"y": fp.nn.upsample(x, 2)}, fp.spec((1, 1, 4)))
    step = fp.compile(graph, target="cpu:threads=1")
    assert not fallbacks(step.program)
    found = step.bind().step({"x": given[None]}).outputs["y"]
    np.testing.assert_array_equal(found.view(np.uint32), given[None].repeat(2, 2).view(np.uint32))
