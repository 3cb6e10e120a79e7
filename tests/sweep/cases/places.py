"""Drawn views, copies, gathers and scatters."""

from __future__ import annotations

from random import Random

from foreplan.graph.types import DTYPES, Shape, as_dtype
from foreplan.ops.first_equal import FirstEqual
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.index_elements import GatherElements, ScatterElementsAdd
from foreplan.ops.join import Concat, Pad, Unslice
from foreplan.ops.map_scatter_add import MapScatterAdd
from foreplan.ops.marks import ByMode, Quantised, StopGradient, StraightThrough
from foreplan.ops.scatter_reduce import ScatterReduce
from foreplan.ops.shape import Broadcast, Reshape, Slice, Transpose
from foreplan.ops.storage import Bitcast
from foreplan.ops.unstack import Unstack
from tests.sweep.case import Case
from tests.sweep.draws import (
    INTEGER_TYPES,
    any_type,
    broadcastable,
    float_type,
    given,
    indices,
    permutation,
    plain,
    shape,
)


def reshape(rng: Random) -> Case:
    """Axes merged, split and added."""
    extents = shape(rng, 0, 5)
    size, left, found = 1, 1, []
    for n in extents:
        size *= n
    left = size
    for _ in range(rng.randint(0, 4)):
        if left <= 1:
            found.append(left)
            left = 1 if left else 0
            continue
        factor = rng.choice([n for n in range(1, min(left, 40) + 1) if left % n == 0])
        found.append(factor)
        left //= factor
    found.append(left)
    return Case(Reshape(tuple(found)), (given(rng, any_type(rng), extents),))


def bitcast(rng: Random) -> Case:
    """Integers as others of their size, or as elements that are only stored."""
    old = as_dtype(rng.choice(INTEGER_TYPES))
    alike = [dtype for dtype in DTYPES.values() if dtype.itemsize == old.itemsize and dtype.category != "bool"]
    new = rng.choice([dtype for dtype in alike if not dtype.is_float and dtype != old])
    return Case(Bitcast(new), (given(rng, old, shape(rng)),))


def transpose(rng: Random) -> Case:
    """Axes in any order."""
    extents = shape(rng, 0, 5)
    return Case(Transpose(permutation(rng, len(extents))), (given(rng, any_type(rng), extents),))


def _slices(rng: Random, extents: Shape) -> tuple[Shape, Shape, Shape]:
    """Starts, counts and steps that stay within."""
    starts, counts, steps = [], [], []
    for n in extents:
        step = rng.choice([1, 1, 1, 2, 3, -1, -2])
        if not n or rng.random() < 0.05:
            start, count = 0, 0
        else:
            start = rng.randrange(n)
            room = (n - 1 - start) // step if step > 0 else start // -step
            count = rng.randint(1, room + 1)
        starts.append(start)
        counts.append(count)
        steps.append(step)
    return tuple(starts), tuple(counts), tuple(steps)


def slice_(rng: Random) -> Case:
    """Forward and backward."""
    extents = shape(rng, 1, 5)
    starts, counts, steps = _slices(rng, extents)
    return Case(Slice(starts, counts, steps), (given(rng, any_type(rng), extents),))


def unslice(rng: Random) -> Case:
    """Its adjoint."""
    extents = shape(rng, 1, 5)
    starts, counts, steps = _slices(rng, extents)
    return Case(Unslice(extents, starts, steps), (given(rng, any_type(rng), counts),))


def broadcast(rng: Random) -> Case:
    """New axes, and axes of extent 1."""
    extents = shape(rng, 0, 5)
    return Case(Broadcast(extents), (given(rng, any_type(rng), broadcastable(rng, extents)),))


def concat(rng: Random) -> Case:
    """Pieces of any extent, nothing among them."""
    extents, dtype = shape(rng, 1, 5), any_type(rng)
    axis = rng.randrange(len(extents))
    sizes = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rng.randint(1, 4))]
    inputs = [given(rng, dtype, (*extents[:axis], n, *extents[axis + 1 :])) for n in sizes]
    return Case(Concat(axis), tuple(inputs))


def pad(rng: Random) -> Case:
    """All modes; no more than can be mirrored or continued."""
    mode = rng.choice(["constant", "constant", "edge", "reflect", "wrap"])
    extents, dtype = shape(rng, 1, 4, 1024, empty=mode == "constant"), any_type(rng)
    most = {"constant": lambda n: 4, "edge": lambda n: 4, "reflect": lambda n: n - 1, "wrap": lambda n: n}[mode]
    pads = tuple((rng.randint(0, min(4, most(n))), rng.randint(0, min(4, most(n)))) for n in extents)
    value = rng.choice([0.0, 1.0]) if not dtype.is_float else rng.choice([0.0, 1.5, -float("inf")])
    return Case(Pad(pads, value, mode) if abs(value) < 2 else Pad(pads, 7.25, mode), (given(rng, dtype, extents),))


def unstack(rng: Random) -> Case:
    """Along the first axis."""
    return Case(Unstack(), (given(rng, any_type(rng), (rng.randint(1, 6), *shape(rng, 0, 4))),))


def dropout(rng: Random) -> Case:
    """In inference."""
    from foreplan.ops.random import Dropout

    return Case(Dropout(rng.choice([0.0, 0.3, 1.0]), rng.random() < 0.5), (given(rng, float_type(rng), shape(rng)),))


def stop_gradient(rng: Random) -> Case:
    """Forward."""
    return Case(StopGradient(), (given(rng, any_type(rng), shape(rng)),))


def by_mode(rng: Random) -> Case:
    """Two of one type."""
    dtype, extents = float_type(rng), shape(rng)
    return Case(ByMode(), (given(rng, dtype, extents), given(rng, dtype, extents)))


def straight_through(rng: Random) -> Case:
    """Forward: the result, and not what stands for its gradient."""
    dtype, extents = float_type(rng), shape(rng)
    return Case(StraightThrough(), (given(rng, dtype, extents), given(rng, dtype, extents)))


def quantised(rng: Random) -> Case:
    """Forward: what was restored, and not the integers that it was restored from."""
    dtype, extents = float_type(rng), shape(rng)
    codes = as_dtype(rng.choice(["int8", "uint8", "int32"]))
    beside = [given(rng, as_dtype("float32"), ()), *([given(rng, codes, ())] if rng.random() < 0.5 else [])]
    return Case(Quantised(), (given(rng, dtype, extents), given(rng, codes, extents), *beside))


def _table(rng: Random) -> tuple[Shape, int]:
    extents = shape(rng, 1, 4, empty=False)
    return extents, rng.randrange(len(extents))


def gather(rng: Random) -> Case:
    """Indices from both ends, and beyond them, where they go round."""
    extents, axis = _table(rng)
    n = extents[axis]
    reach = n if rng.random() < 0.7 else 3 * n
    return Case(Gather(axis), (given(rng, any_type(rng), extents), indices(rng, shape(rng, 0, 3, 64), -reach, reach)))


def scatter_add(rng: Random) -> Case:
    """Rows added where indices meet, in their order."""
    many = rng.random() < 0.06  # which are sorted in several parts
    extents, axis = ((rng.choice([3, 40]), 2), 0) if many else _table(rng)
    dtype = float_type(rng) if rng.random() < 0.8 else any_type(rng)
    n = extents[axis]
    where = indices(rng, (rng.choice([4096, 4100, 9001]),) if many else shape(rng, 0, 3, 64), -n, n)
    updates = (*extents[:axis], *where.type.shape, *extents[axis + 1 :])
    base = [plain(rng, dtype, extents) if dtype.is_float else given(rng, dtype, extents)] * (rng.random() < 0.3)
    return Case(ScatterAdd(axis, extents), (where, given(rng, dtype, updates, strange=("tiny", "huge")), *base))


def first_equal(rng: Random) -> Case:
    """Few places and many, indices beyond them, where they go round, and so many that they are sorted in parts."""
    extent = rng.choice([1, 2, 7, 300, 5000, 10**6, 3 * 10**9])
    count = rng.choice([4097, 9000]) if rng.random() < 0.06 else rng.choice([0, 1, 2, 5, 30, 200])
    some = rng.choice([min(extent, 5), extent])
    return Case(FirstEqual(extent), (indices(rng, (count,), -some, rng.choice([some, 3 * extent])),))


def map_scatter_add(rng: Random) -> Case:
    """Rows added to what a map gives of tensors and a number, as optimizers do."""
    extents, axis = _table(rng)
    dtype, n = float_type(rng), extents[axis]
    where = indices(rng, shape(rng, 0, 2, 64), -n, n)
    updates = (*extents[:axis], *where.type.shape, *extents[axis + 1 :])
    expr, whole, numbers = rng.choice([("(0.9 * a0)", 1, 0), ("(a0 - (a2 * (0.9 * a1)))", 2, 1), ("a0", 1, 0)])
    shapes = [updates, *[extents] * whole, *[()] * numbers]
    return Case(MapScatterAdd(axis, extents, expr), (where, *(plain(rng, dtype, each) for each in shapes)))


def scatter_reduce(rng: Random) -> Case:
    """Rows that change others where indices meet; products stay of a size."""
    extents, axis = _table(rng)
    how = rng.choice(["mul", "min", "max"])
    dtype = float_type(rng) if how == "mul" or rng.random() < 0.8 else as_dtype(rng.choice(["int64", "int32", "uint8"]))
    n = extents[axis]
    where = indices(rng, shape(rng, 0, 2, 8), -n, n)
    updates = (*extents[:axis], *where.type.shape, *extents[axis + 1 :])
    values = "ties" if dtype.is_float and rng.random() < 0.3 else "normal" if dtype.is_float else None
    both = [given(rng, dtype, each, values) for each in (updates, extents)]
    return Case(ScatterReduce(axis, extents, how), (where, *both))


def apart_scatter_reduce(rng: Random) -> Case:
    """No two alike, where differences are taken."""
    return scatter_reduce(rng).valued("apart")


def gather_elements(rng: Random) -> Case:
    """One element an index."""
    extents, axis = _table(rng)
    n = extents[axis]
    places = (*extents[:axis], rng.choice([0, 1, 2, 5, 9]), *extents[axis + 1 :])
    return Case(GatherElements(axis), (given(rng, any_type(rng), extents), indices(rng, places, -n, n)))


def scatter_elements_add(rng: Random) -> Case:
    """One element an index, added."""
    extents, axis = _table(rng)
    dtype = float_type(rng) if rng.random() < 0.8 else any_type(rng)
    n = extents[axis]
    places = (*extents[:axis], rng.choice([0, 1, 2, 5, 9]), *extents[axis + 1 :])
    updates = given(rng, dtype, places, strange=("tiny", "huge"))
    return Case(ScatterElementsAdd(axis, extents), (indices(rng, places, -n, n), updates))
