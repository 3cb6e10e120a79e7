"""Parts of an op, as `Op.indexing` says: computed in float64 from parts of its inputs, against the oracle's results.

Boxes of the result; cuts of it into 2 to 4, joined; and sums over 2 to 4 ranges of each factor that is summed, put
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from foreplan.graph import GraphBuilder, Node, Op
from foreplan.graph.axes import named
from foreplan.ops.shape import Slice, slices
from foreplan.passes.narrowing import Narrowed, box_of, narrowed, summed, sums_of, touched
from tests.ops.check import type_of
from tests.sweep.bounds import Expected, complaint, expectation, widened
from tests.sweep.case import Case
from tests.sweep.judges.numpy import outputs
from tests.sweep.table import ENTRIES, Entry, class_of

BOXES = 8  # of a case
HINT = "does any part need all of a factor that `indexing` leaves out of `whole`?"
TOGETHER: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "mean": np.add,  # of shares
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def serves(entry: Entry, name: str) -> bool:
    """Whether the op says what its axes walk; a part of random numbers is another draw."""
    op = class_of(name)
    return op.indexing is not Op.indexing and not op.is_random


def judge(case: Case) -> int:
    """Raise AssertionError where a part is something else than the same elements of the whole; the number of parts."""
    entry, arrays, rng = ENTRIES[case.op.name], widened(case.arrays()), Random(case.number)
    b = GraphBuilder()
    b.node(case.op, *(b.input(f"x{i}", type_of(x)) for i, x in enumerate(arrays)))
    (node,) = b.nodes
    if not node.outputs:
        return 0
    _check(node)
    wanted = expectation(case.op, entry.oracle, entry.rule, arrays, "numpy")
    shape = node.outputs[0].shape
    drawn = [box for box in (drawn_box(rng, shape) for _ in range(BOXES)) if touched(box, shape)]
    cuts = [_cut(shape, axis, rng.randint(2, 4)) for axis, extent in enumerate(shape) if extent > 1]
    asked = 0
    for boxes in (*([box] for box in drawn), *cuts):
        ways = [narrowed(node, box) for box in boxes]
        found = [way for way in ways if way is not None]
        for way in found:
            for i, (y, each, box) in enumerate(zip(_made(way, arrays), wanted, way.outputs, strict=True)):
                wrong = complaint(y, _part(each, box))
                assert wrong is None, f"output {i} of {way.op} for {box}: {wrong}; {HINT}"
        asked += len(found)
    for factor in [name for name, (extent, _) in sums_of(node).items() if extent]:
        asked += _judge_sum(node, factor, rng.randint(2, 4), arrays, wanted)
    return asked


def _check(node: Node) -> None:
    """Factors fill dense axes in C order, and each is whole, summed or in all outputs."""
    axes = node.op.indexing([x.type for x in node.inputs], [y.type for y in node.outputs])
    if axes is None:
        return
    for values, of in ((node.inputs, axes.inputs), (node.outputs, axes.outputs)):
        shapes, ranks = [value.shape for value in values], [len(dims) for dims in of]
        assert ranks == [len(shape) for shape in shapes], f"`indexing` has tensors of {ranks} axes for {shapes}"
    for dims, shape in zip((*axes.inputs, *axes.outputs), (x.shape for x in (*node.inputs, *node.outputs))):
        for dim, extent in zip(dims, shape, strict=True):
            step = 1
            for name, unit in reversed(dim.terms) if dim.dense else ():
                assert unit == step, f"{dim} is in no C order"
                step *= axes.extents[name]
            assert not dim.dense or not dim.terms or step == extent, f"{dim} does not fill an axis of {extent}"
    told = set(axes.extents) - axes.whole - axes.sums.keys()
    assert all(told <= named(dims) for dims in axes.outputs), f"not all of {sorted(told)} are in all outputs"


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


def _cut(shape: tuple[int, ...], axis: int, count: int) -> list[Slice]:
    """Boxes of ranges of an axis, one behind the other."""
    places = [(0, extent, 1) for extent in shape]
    return [box_of([*places[:axis], place, *places[axis + 1 :]]) for place in _ranges(shape[axis], count)]


def _ranges(extent: int, count: int) -> list[tuple[int, int, int]]:
    """As equal as can be, none empty."""
    ends = sorted({extent * part // count for part in range(count + 1)})
    return [(start, stop - start, 1) for start, stop in itertools.pairwise(ends)]


def _judge_sum(node: Node, factor: str, count: int, arrays: Sequence[np.ndarray], wanted: Sequence[Expected]) -> int:
    """Results of ranges of a factor, put together, are those of the whole."""
    at, (extent, how) = node.op.accumulates, sums_of(node)[factor]
    totals: list[np.ndarray] = []
    ranges = _ranges(extent, count)
    for start, number, _ in ranges:
        way = summed(node, factor, start, number)
        if way is None:
            return 0
        if totals and at:  # what is added to is added to once
            way = replace(way, inputs=way.inputs[:at])
        own = _made(way, arrays[: len(way.inputs)])
        if how == "mean":
            own = [y * (number / extent) for y in own]
        with np.errstate(all="ignore"):
            totals = [TOGETHER[how](x, y) for x, y in zip(totals, own, strict=True)] if totals else own
    for i, (y, each) in enumerate(zip(totals, wanted, strict=True)):
        wrong = complaint(y, each)
        assert wrong is None, f"output {i} of {node.op}, put together of {len(ranges)} ranges of {factor!r}: {wrong}"
    return len(ranges)


def _made(way: Narrowed, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a part gives."""
    given = [x if box is None else np.ascontiguousarray(x[_of(box)]) for x, box in zip(arrays, way.inputs, strict=True)]
    return outputs(way.op, given)


def _part(each: Expected, box: Slice) -> Expected:
    """What is expected of a box."""
    own = {name: getattr(each, name)[_of(box)] for name in ("values", "allowed", "open")}
    return replace(each, type=each.type.with_shape(box.shape), **own)


def _of(box: Slice) -> tuple[slice, ...]:
    return slices(box.starts, box.shape, box.steps)
