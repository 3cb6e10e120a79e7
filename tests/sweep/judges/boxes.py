"""A box of an op's results, computed from boxes of its inputs: in float64 against the oracle's results."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from foreplan.graph import GraphBuilder
from foreplan.graph.registry import registered_ops
from foreplan.ops.shape import Slice, slices
from foreplan.passes.narrowing import RULES, box_of, narrowed, touched
from tests.ops.check import type_of
from tests.sweep.bounds import complaint, expectation, widened
from tests.sweep.case import Case
from tests.sweep.judges.numpy import outputs
from tests.sweep.table import ENTRIES, Entry

BOXES = 8  # of a case


def serves(entry: Entry, name: str) -> bool:
    """Whether there is a rule for the op."""
    return registered_ops()[name] in RULES


def judge(case: Case) -> int:
    """Raise AssertionError where a box is something else than the same elements of the whole; the number of boxes."""
    entry, arrays, rng = ENTRIES[case.op.name], widened(case.arrays()), Random(case.number)
    b = GraphBuilder()
    b.node(case.op, *(b.input(f"x{i}", type_of(x)) for i, x in enumerate(arrays)))
    (node,) = b.nodes
    wanted = expectation(case.op, entry.oracle, entry.rule, arrays, "numpy")
    asked = 0
    for _ in range(BOXES):
        box = drawn_box(rng, node.outputs[0].shape)
        found = narrowed(node, box)
        if found is None or not touched(box, node.outputs[0].shape):
            continue
        given = [x if cut is None else np.ascontiguousarray(x[_of(cut)]) for x, cut in zip(arrays, found.inputs)]
        for i, (y, each, cut) in enumerate(zip(outputs(found.op, given), wanted, found.outputs, strict=True)):
            own = {name: getattr(each, name)[_of(cut)] for name in ("values", "allowed", "open")}
            wrong = complaint(y, replace(each, type=each.type.with_shape(cut.shape), **own))
            assert wrong is None, f"output {i} of {found.op} for {box}: {wrong}"
        asked += 1
    return asked


def drawn_box(rng: Random, shape: tuple[int, ...]) -> Slice:
    """Of one axis or two, rarely with steps."""
    axes = rng.sample(range(len(shape)), min(len(shape), rng.choice((1, 1, 1, 2))))
    places = [(0, extent, 1) for extent in shape]
    for axis in axes:
        extent = shape[axis]
        start, step = rng.randrange(extent) if extent else 0, rng.choice((1, 1, 1, 2))
        most = -(-(extent - start) // step)
        places[axis] = start, rng.randint(1, most) if most else 0, step
    return box_of(places)


def _of(box: Slice) -> tuple[slice, ...]:
    return slices(box.starts, box.shape, box.steps)
