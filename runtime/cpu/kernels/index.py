"""Gathering slices, adding or combining slices at the places of indices, and finding equal indices, by compiled loops.

Slices are added in the order of the indices. Parts of the work are ranges of places within a slice, so no result
depends on the number of threads.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from foreplan.graph import Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Arrays, Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.blocks import folded_shape
from foreplan.ops.first_equal import FirstEqual
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.map_scatter_add import MapScatterAdd
from foreplan.ops.scatter_reduce import ScatterReduce
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.elements import check_elements, number, written
from foreplan.runtime.cpu.codegen.jit import inlined, looped
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.elementwise import elementwise
from foreplan.runtime.cpu.kernels.rows import Rows, flat, flat_input, rows_from, same_place
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run, one_after_another

GROUP = 16  # elements of a slice that stay together: a line of the cache
GRAIN = 1 << 15  # elements that are worth a thread of their own
_HOW = {"mul": 0, "min": 1, "max": 2}  # as `_combined` has them

_compiled = looped


@inlined
def _within(index, extent):  # type: ignore[no-untyped-def]
    """An index modulo the axis: a division only where it needs one."""
    wide = np.int64(index)
    if 0 <= wide < extent:
        return wide
    if index > 0:  # a uint64 may be more than int64 holds
        return np.int64(np.uint64(index) % np.uint64(extent))
    return wide % extent


@_compiled
def _gather(start, stop, data, extent, indices, width, y):  # type: ignore[no-untyped-def]
    """Slices [start, stop) of all that are read, `width` elements each."""
    outer, at = start // len(indices), start % len(indices)
    for i in range(start, stop):
        place = outer * extent + _within(indices[at], extent)
        if width == 1:
            y[i] = data[place]
        else:
            row, out = data[place * width : (place + 1) * width], y[i * width : (i + 1) * width]
            for k in range(len(out)):
                out[k] = row[k]
        at += 1
        if at == len(indices):
            outer, at = outer + 1, 0


@_compiled
def _gather_in_blocks(start, stop, data, extent, indices, width, y, rows, outer, inner, columns, far, near):  # type: ignore[no-untyped-def]
    """Rows [start, stop) of a matrix that lies in blocks of `rows` × `columns`."""
    for i in range(start, stop):
        place = _within(indices[i], extent)
        at = place // rows * outer + place % rows * inner
        for low in range(0, width, columns):
            here = at + low // columns * far
            for k in range(low, min(low + columns, width)):
                y[i * width + k] = data[here + (k - low) * near]


@_compiled
def _scatter(start, stop, y, extent, width, indices, updates, count, step):  # type: ignore[no-untyped-def]
    """All updates, within the groups of elements [start, stop) of their slices."""
    low, high = start * GROUP, min(stop * GROUP, width)
    outer, at = 0, 0
    for i in range(count):
        place = outer * extent + _within(indices[at], extent)
        if width == 1:
            y[place] += number(updates[i * step])
        else:
            row, out = updates[i * step + low : i * step + high], y[place * width + low : place * width + high]
            for k in range(len(out)):
                out[k] += number(row[k])
        at += 1
        if at == len(indices):
            outer, at = outer + 1, 0


@inlined
def _combined(how, x, y):  # type: ignore[no-untyped-def]
    """A product (0), the smaller (1) or the larger one (2); NaN wins."""
    if how == 0:
        return x * y
    if how == 1:
        return y if y < x or y != y else x
    return y if y > x or y != y else x


@_compiled
def _scatter_reduced(start, stop, y, extent, width, indices, updates, count, step, how):  # type: ignore[no-untyped-def]
    """As `_scatter`, combined instead of added."""
    low, high = start * GROUP, min(stop * GROUP, width)
    outer, at = 0, 0
    for i in range(count):
        place = outer * extent + _within(indices[at], extent)
        row, out = updates[i * step + low : i * step + high], y[place * width + low : place * width + high]
        for k in range(len(out)):
            out[k] = _combined(how, out[k], number(row[k]))
        at += 1
        if at == len(indices):
            outer, at = outer + 1, 0


@_compiled
def _widened(start, stop, row, line):  # type: ignore[no-untyped-def]
    for k in range(start, stop):
        line[k] = number(row[k])


@_compiled
def _first_equal(indices, extent, slots, bits, y):  # type: ignore[no-untyped-def]
    """A table of 2^bits slots, each the first position of an index or -1; its slot is the first free one from its
    hash on (Knuth 1973, section 6.4).
    """
    for i in range(len(slots)):
        slots[i] = -1
    for i in range(len(indices)):
        place = _within(indices[i], extent)
        slot = (((place & 0x7FFFFFFF) * 2654435761) & 0xFFFFFFFF) >> (32 - bits)
        while slots[slot] >= 0 and _within(indices[slots[slot]], extent) != place:
            slot = (slot + 1) & (len(slots) - 1)
        if slots[slot] < 0:
            slots[slot] = i
        y[i] = slots[slot]


def gather(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `Gather`, by ranges of slices: elements of any type, moved by their size. A matrix whose rows are
    read may lie in blocks.
    """
    assert isinstance(op, Gather)
    _, extent, width = folded_shape(inputs[0].shape, op.axis)
    if inputs[0].type.dtype.itemsize not in (1, 2, 4, 8) or not outputs[0].type.size:
        raise Refused(f"{inputs[0].type}")
    count, blocks = outputs[0].type.size // width, inputs[0].blocks
    steps = None if blocks is None or blocks.shape != inputs[0].shape or op.axis != 0 else blocks.steps
    if blocks is not None and (steps is None or len(steps) != 2):
        raise Refused(f"{inputs[0].type} in the blocks {blocks}")
    function = _gather if steps is None else _gather_in_blocks
    more = () if steps is None else (*steps[0], *steps[1])

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        bits = np.dtype(f"u{inputs[0].itemsize}")
        data, indices, y = flat_input(inputs[0]).view(bits), flat_input(inputs[1]), flat(outputs[0]).view(bits)
        given = (data, extent, indices, width, y, *more)
        return ranged(function, count, max(1, GRAIN // width), current_threads(), *given)

    return LoopKernel(loops, nanoseconds=None if steps is None else prices.gathered(outputs[0].type.size))


def scatter_add(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `ScatterAdd` and `ScatterReduce` of float32 or bfloat16: a copy or zeros first, then all updates,
    by ranges of the elements of a slice. Sums of bfloat16 are float32, and rounded at the end.
    """
    assert isinstance(op, ScatterAdd)
    check_elements(inputs[1])
    rows, (_, extent, width) = _slices(op, inputs[1]), folded_shape(op.shape, op.axis)
    if rows is None:
        raise Refused(f"{inputs[1].type} with the strides {inputs[1].strides}")
    narrow, based = outputs[0].type.dtype != FLOAT32, len(inputs) == 3
    if narrow and based and inputs[2] != Window.dense(inputs[2].type):
        raise Refused(f"{inputs[2].type} with the strides {inputs[2].strides}")
    count, step, size = rows.count, rows.step, outputs[0].type.size

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        y = scratch[0] if narrow else outputs[0]
        runs, last = list[Run](), list[Run]()
        if not based:
            runs.append(partial(y.fill, 0))
        elif narrow:
            runs.append(ranged(_widened, size, GRAIN, current_threads(), flat_input(inputs[2]), y))
        elif not same_place(y, inputs[2]):
            runs.append(partial(np.copyto, y, inputs[2]))
        if narrow:
            last.append(partial(written, y, flat(outputs[0])))
        given = (flat(y), extent, width, flat_input(inputs[0]), flat_input(inputs[1]), count, step)
        groups, grain = -(-width // GROUP), max(1, GRAIN // (count * GROUP))
        function, how = (_scatter_reduced, (_HOW[op.how],)) if isinstance(op, ScatterReduce) else (_scatter, ())
        return one_after_another(*runs, ranged(function, groups, grain, current_threads(), *given, *how), *last)

    overwrites = ((0, 2),) if based and lie_alike(inputs[2], outputs[0]) else ()
    return LoopKernel(loops, (((size if narrow else 0,), np.dtype(np.float32)),), overwrites)


def map_scatter_add(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The loop of the map, and the one that adds to its result in place."""
    assert isinstance(op, MapScatterAdd)
    mapped = elementwise(op.map, inputs[2:], outputs)
    added = scatter_add(ScatterAdd(op.axis, op.shape), [*inputs[:2], *outputs], outputs)
    if mapped.workspace:
        raise Refused(f"the map {op.expr} with a workspace")

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        first = mapped.bind(inputs[2:], outputs, np.empty(0, np.uint8))
        return one_after_another(first, added.loops([*inputs[:2], *outputs], outputs, scratch))

    return LoopKernel(loops, added.pieces, tuple((o, i + 2) for o, i in mapped.overwrites))


def first_equal(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel of `FirstEqual`, with a hash table of at least twice as many slots as there are indices."""
    assert isinstance(op, FirstEqual)
    bits = (2 * inputs[0].type.size).bit_length()
    if bits > 32:
        raise Refused(f"{inputs[0].type}")

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        return partial(_first_equal, flat_input(inputs[0]), op.extent, scratch[0], bits, flat(outputs[0]))

    return LoopKernel(loops, (((1 << bits,), np.dtype(np.int64)),))


def _slices(op: ScatterAdd, updates: Window) -> Rows | None:
    """Updates as slices evenly apart."""
    behind = len(op.shape) - op.axis - 1
    return rows_from(updates, len(updates.shape) - behind)


def scatter_reads(op: Op, index: int, window: Window) -> Window:
    """Updates as slices evenly apart; what they are added to in any layout; all else in C order."""
    assert isinstance(op, ScatterAdd)
    as_it_lies = index > 1 or (index == 1 and _slices(op, window) is not None)
    return window if as_it_lies else Window.dense(window.type)
