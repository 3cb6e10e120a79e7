"""Slices that are read or added at the places of indices, and equal indices. Sums are taken in the order of the
indices, or in parts where places have thousands of slices.
"""

from __future__ import annotations

import math

from foreplan.base.units import ceil_div
from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.first_equal import FirstEqual
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.map import merged_axes
from foreplan.ops.map_scatter_add import MapScatterAdd
from foreplan.ops.scatter_reduce import ScatterReduce
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import broadcast, copies, index_type, map_launches
from foreplan.runtime.cuda.kernels.reduce import Axis, Terms, reduction
from foreplan.runtime.cuda.launch import (
    Clear,
    Defines,
    Instruction,
    Launch,
    LaunchKernel,
    Scratch,
    Word,
    added_in_place,
    for_each,
    input_at,
    launch,
    output_at,
    side_by_side,
)
from foreplan.runtime.kernel import Refused, pairs_alike

BYTES = 16  # that a thread reads at a time
SORTING, TILE = 512, 4096  # threads of a block that sorts, and its positions
ADDING = 128  # threads of a block that adds
MOST_BITS = 9  # of a digit that is sorted by
MANY, FEW_BYTES = 16, 4  # from so many slices a place on, fewer bytes of more slices are read at a time
LONG = 4096  # slices a place on average, from which on they are added in parts, and not in the order of the indices
AHEAD = 32  # slices that a thread reads before it adds, if a place has many
BUSY = 512  # threads that add in parts, for each multiprocessor
MOST_PARTS, PARTS_BYTES = 512, 4 << 20
# What is assumed of times, not measured: how many times the mean the fullest place has, as in T5's relative positions;
# and nanoseconds for a thread to read AHEAD slices.
FULLEST, STEP = 9, 1700
SORT = 8_000  # nanoseconds of a pass, whose tiles a block each sorts (H200: DLRM's 26 tables, 2,048 positions each)
_BYTES = {"u32": 4, "u64": 8}
_HOW = {"mul": 1, "min": 2, "max": 3}  # as `scatter_add.cu` has them


def gather(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch."""
    assert isinstance(op, Gather)
    data, indices = inputs
    (y,), behind = outputs, len(data.shape) - op.axis - 1
    if not y.type.size:
        return LaunchKernel(())
    outer, inner = math.prod(data.shape[: op.axis]), math.prod(data.shape[op.axis + 1 :])
    vector = BYTES // y.type.dtype.itemsize
    while vector > inner:
        vector //= 2
    words: list[Word] = [outer, indices.type.size, inner, data.shape[op.axis], input_at(1)]
    words += [input_at(0), *_folded(data, op.axis, behind), output_at(0), *_folded(y, op.axis, behind)]
    units = outer * indices.type.size * ceil_div(inner, vector)
    defines: Defines = (
        ("ELEMENT", y.type.dtype),
        ("PLACE", indices.type.dtype),
        ("VECTOR", vector),
        ("INDEX", index_type(units)),
    )
    return LaunchKernel((for_each("index.cu", "gather", units, words, defines),))


def scatter_add(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Zeros, a copy of the summand or a map; positions sorted by place, in the workspace; and one launch that adds.
    Where places have thousands of slices each, one adds these in parts, and one adds the parts up.
    """
    assert isinstance(op, ScatterAdd)
    indices, updates, *base = inputs
    (y,), behind = outputs, len(op.shape) - op.axis - 1
    if not y.type.dtype.is_float:
        raise Refused(f"sums of {y.type}")
    found: list[Instruction] = []
    overwrites = added_in_place(inputs, y)
    if isinstance(op, MapScatterAdd):
        tensors = [broadcast(input_at(2 + i), x, op.shape) for i, x in enumerate(base)]
        found += map_launches(op.map.parsed, op.shape, tensors, [broadcast(output_at(0), y, op.shape)])
        overwrites = pairs_alike(inputs, outputs, 2)
    elif base:
        found += copies(input_at(2), base[0], output_at(0), y)
    elif y.type.size:
        found.append(Clear(output_at(0), y.type.nbytes))
    if not updates.type.size:
        return LaunchKernel(tuple(found), overwrites=overwrites)
    outer, extent, inner = math.prod(op.shape[: op.axis]), op.shape[op.axis], math.prod(op.shape[op.axis + 1 :])
    count = indices.type.size
    many = count >= MANY * extent
    item, folded = y.type.dtype.itemsize, [_folded(x, op.axis, behind) for x in (y, updates)]
    lying = [(item, inside, others) for *others, inside in folded]
    vector = side_by_side(max(1, (FEW_BYTES if many else BYTES) // item), inner, lying)
    units = outer * count * (inner // vector)
    results = outer * extent * (inner // vector)
    adds = not isinstance(op, ScatterReduce)
    parts = _parts(count // max(1, extent), results, y.type.size, device) if adds else 1
    index = index_type(max(units, extent, parts * results))
    defines: Defines = (
        ("ELEMENT", y.type.dtype),
        ("PLACE", indices.type.dtype),
        ("VECTOR", vector),
        ("INDEX", index),
        ("BITS", _bits(extent)[0]),
        ("AHEAD", AHEAD if many else 8),
        ("ADDS", int(bool(base))),
        ("HOW", _HOW[op.how] if isinstance(op, ScatterReduce) else 0),
    )
    order = _Order(defines, count, extent, index)
    found += order.launches()
    words: list[Word] = [outer, count, inner, order.positions, order.places]
    words += [output_at(0), *folded[0], input_at(1), *folded[1], extent, parts]
    nanoseconds = order.nanoseconds(op, inputs, outputs, device)
    if many:
        nanoseconds += STEP * ceil_div(FULLEST * count, max(1, extent) * parts * AHEAD)
    if parts == 1:
        words.append(0)
        found.append(launch("scatter_add.cu", "scatter_add", ceil_div(units, ADDING), words, defines, threads=ADDING))
        return LaunchKernel(tuple(found), order.scratch.nbytes, overwrites, nanoseconds=nanoseconds)
    wide, nbytes = y.type.dtype.wide, y.type.size * y.type.dtype.wide.itemsize
    sums = order.scratch.take(parts * nbytes)
    blocks = ceil_div(parts * results, ADDING)
    found.append(launch("scatter_add.cu", "scatter_parts", blocks, [*words, sums], defines, threads=ADDING))
    terms = Terms(sums, wide, (Axis(y.type.size, wide.itemsize),), (Axis(parts, nbytes),))
    found.append(reduction("sum", terms, output_at(0), y.type.dtype, 1, None))
    return LaunchKernel(tuple(found), order.scratch.nbytes, overwrites, nanoseconds=nanoseconds)


def first_equal(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Positions sorted by place, in the workspace; and one launch, a thread a position."""
    assert isinstance(op, FirstEqual)
    count, index = inputs[0].type.size, index_type(max(inputs[0].type.size, op.extent))
    if not count:
        return LaunchKernel(())
    defines: Defines = (
        ("ELEMENT", FLOAT32),
        ("PLACE", inputs[0].type.dtype),
        ("VECTOR", 1),
        ("INDEX", index),
        ("BITS", _bits(op.extent)[0]),
        ("AHEAD", 1),
        ("ADDS", 0),
        ("HOW", 0),
    )
    order = _Order(defines, count, op.extent, index)
    words: list[Word] = [count, order.positions, order.places, output_at(0)]
    last = launch("scatter_add.cu", "first_equal", ceil_div(count, ADDING), words, defines, threads=ADDING)
    nanoseconds = order.nanoseconds(op, inputs, outputs, device)
    return LaunchKernel((*order.launches(), last), order.scratch.nbytes, nanoseconds=nanoseconds)


def _bits(extent: int) -> tuple[int, int]:
    """Bits of a digit that places on an axis are sorted by, and how many digits they have."""
    passes = max(1, ceil_div((extent - 1).bit_length(), MOST_BITS))
    return max(1, ceil_div((extent - 1).bit_length(), passes)), passes


def _parts(slices: int, threads: int, elements: int, device: Device) -> int:
    """Parts of each place's slices that keep the multiprocessors busy, none of them short; one for a few slices.

    Args:
        slices: of a place, if each has as many.
        threads: that add in each part.
        elements: of the table.
    """
    if slices < LONG:
        return 1
    wanted = BUSY * device.multiprocessors // threads
    return max(1, min(wanted, slices // AHEAD, MOST_PARTS, PARTS_BYTES // (8 * elements)))


class _Order:
    """Positions of indices, sorted by the indices' places: their addresses in the workspace, and their launches.

    Attributes:
        positions, places: sorted positions, and the place of each.
    """

    def __init__(self, defines: Defines, count: int, extent: int, index: str) -> None:
        """A pass for each digit of the places."""
        self.defines, self.count, self.extent = defines, count, extent
        self.bits, self.passes = _bits(extent)
        self.scratch, self.tiles = Scratch(), ceil_div(count, TILE)
        nbytes = _BYTES[index]
        self.positions, self.places = (self.scratch.take(nbytes * count) for _ in range(2))
        self.others = self.scratch.take(nbytes * count) if self.passes > 1 else self.positions
        self.digits = self.scratch.take(nbytes * (self.tiles << self.bits)) if self.tiles > 1 else 0

    def launches(self) -> list[Launch]:
        """A pass for each digit, of which the last one writes `positions`."""
        found: list[Launch] = []
        given: Word = 0
        for i in range(self.passes):
            target = self.others if (self.passes - 1 - i) % 2 else self.positions
            words: list[Word] = [self.count, self.extent, i * self.bits, self.tiles, input_at(0), given]
            words += [self.digits, target, self.places]
            if self.tiles > 1:
                found.append(self._launch("count_digits", words))
            found.append(self._launch("sort_by_digit", words))
            given = target
        return found

    def nanoseconds(self, op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
        """The passes, and reading and writing the tensors of an op that needs the order."""
        moved = op.cost([x.type for x in inputs], [y.type for y in outputs]).nbytes / device.bytes_per_second
        return round(moved * 1e9) + SORT * self.passes

    def _launch(self, entry: str, words: list[Word]) -> Launch:
        return launch("scatter_add.cu", entry, self.tiles, words, self.defines, threads=SORTING)


def _folded(x: Window, axis: int, behind: int) -> tuple[int, int, int]:
    """Its steps as [outer, n, inner]: the axes before `axis`, those merged with it, and the last `behind` axes."""
    steps = _steps(x, axis, behind)
    assert steps is not None
    return steps


def _steps(x: Window, axis: int, behind: int) -> tuple[int, int, int] | None:
    """Bytes from one to the next along the three, if each is one axis."""
    rank = len(x.shape)
    ranges = (range(axis), range(axis, rank - behind), range(rank - behind, rank))
    found = [merged_axes(x.shape, [x.strides], axes) for axes in ranges]
    if any(len(axes) > 1 for axes in found):
        return None
    outer, along, inner = (axes[0][1][0] for axes in found)
    return outer, along, inner


def gather_reads(op: Op, index: int, window: Window) -> Window:
    """Data as it lies, where its axes fold into three; indices in C order."""
    assert isinstance(op, Gather)
    folds = index == 0 and _steps(window, op.axis, len(window.shape) - op.axis - 1) is not None
    return window if folds else Window.dense(window.type)


def scatter_reads(op: Op, index: int, window: Window) -> Window:
    """Updates as they lie, where their axes fold into three; what is added to in any layout; indices in C order."""
    assert isinstance(op, ScatterAdd)
    folds = index == 1 and _steps(window, op.axis, len(op.shape) - op.axis - 1) is not None
    return window if folds or index > 1 else Window.dense(window.type)


def indices_reads(op: Op, index: int, window: Window) -> Window:
    """Indices in C order."""
    return Window.dense(window.type)
