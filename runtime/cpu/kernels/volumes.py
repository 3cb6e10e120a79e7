"""Gradients of convolutions of three axes by Winograd's algorithm on the last two, where these have 3 × 3 taps.

A volume is its slices, images one behind the other. The taps of one depth join each slice of the data with the result's
that is so far away: a convolution of two axes. What it gives for the data is added to what the taps before it gave.
Taps that meet all slices come first, and write them.

Results do not go this way: in a small net with ReLU, errors of gradients were four times PyTorch's then, as more inputs
of a ReLU had the other sign; with gradients alone they are as without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Window
from foreplan.graph.op import Arrays
from foreplan.graph.types import FLOAT32
from foreplan.ops.conv.ops import ConvOp
from foreplan.runtime.cpu.kernels.winograd import LANES, TAPS, Convolution, WeightGradient
from foreplan.runtime.cpu.onednn.primitives import OLD
from foreplan.runtime.kernel import Refused, Run, one_after_another

Index = tuple[slice | int, ...]  # items, channels and depth of a tensor; outputs, inputs and depth of weights
RESULT = -1  # the output, read as an input


@dataclass(frozen=True)
class Part:
    """A kernel of two axes on slices of volumes.

    Attributes:
        reads: of each of its inputs, which input of the whole it is, or `RESULT`, and which slices.
        written: which slices of the output.
    """

    kernel: Convolution | WeightGradient
    reads: tuple[tuple[int, Index], ...]
    written: Index


@dataclass(frozen=True)
class Volumes:
    """Kernels of two axes, one after the other, which share their scratch memory.

    Attributes:
        slices: the kernels, each with the slices that it is for.
        base: an input that is added to; or -1.
    """

    slices: tuple[Part, ...]
    base: int

    @property
    def workspace(self) -> int:
        """The most that one of them needs."""
        return max(part.kernel.workspace for part in self.slices)

    @property
    def nanoseconds(self) -> int:
        """Of all."""
        return sum(part.kernel.nanoseconds for part in self.slices)

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """The input that is added to may be changed in place."""
        return ((0, self.base),) if self.base >= 0 else ()

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """See `CpuKernel`."""
        runs = []
        for part in self.slices:
            given = [(outputs[0] if i == RESULT else inputs[i])[index] for i, index in part.reads]
            runs.append(part.kernel.bind(given, [outputs[0][part.written]], workspace[: part.kernel.workspace]))
        return one_after_another(*runs)


@dataclass(frozen=True)
class _Tap:
    """What the taps of one depth join: slices of the data, and as many of the result.

    Attributes:
        depth: of the taps.
        items: all, or one.
        data, result: the slices, and these as images.
    """

    depth: int
    items: slice
    data: tuple[slice, Window]
    result: tuple[slice, Window]

    @property
    def of_data(self) -> Index:
        """Where the data are."""
        return self.items, slice(None), self.data[0]

    @property
    def of_result(self) -> Index:
        """Where the results are."""
        return self.items, slice(None), self.result[0]

    @property
    def weights(self) -> Index:
        """Where the weights are."""
        return slice(None), slice(None), self.depth


def data_gradient(op: ConvOp, g: Window, w: Window, dx: Window, adds: bool) -> Volumes:
    """The gradient of the data, perhaps added to input 2."""
    above, left = (w.shape[3] - 1 - op.pads[1][0], w.shape[4] - 1 - op.pads[2][0])
    parts = []
    for number, group in enumerate(_taps(op, w.shape[2:], dx, g)):
        if number == 0 and not _is_all(group[0].data[0], dx):
            raise Refused("slices of the data that only some taps meet")
        for tap in group:
            reads = [(0, tap.of_result), (1, tap.weights)]
            if number > 0 or adds:
                reads.append((RESULT if number > 0 else 2, tap.of_data))
            follows = [(OLD, 2)] if number > 0 or adds else []
            two = Convolution(tap.result[1], _weights(w), tap.data[1], (above, left), turned=True, after=follows)
            parts.append(Part(two, tuple(reads), tap.of_data))
    return Volumes(tuple(parts), 2 if adds else -1)


def weight_gradient(op: ConvOp, kernel: Sequence[int], x: Window, g: Window, dw: Window, adds: bool) -> Volumes:
    """The gradient of the weights, perhaps added to input 2."""
    parts = []
    groups = list(_taps(op, kernel, x, g))
    if len(groups) < kernel[0]:
        raise Refused("taps that meet no slice")
    for group in groups:
        for number, tap in enumerate(group):
            reads = [(0, tap.of_data), (1, tap.of_result)]
            if number > 0 or adds:
                reads.append((RESULT if number > 0 else 2, tap.weights))
            two = WeightGradient(tap.data[1], tap.result[1], _weights(dw), _before(op), add=number > 0 or adds)
            parts.append(Part(two, tuple(reads), tap.weights))
    return Volumes(tuple(parts), 2 if adds else -1)


def _taps(op: ConvOp, kernel: Sequence[int], x: Window, y: Window) -> list[list[_Tap]]:
    """The taps of each depth, those that meet the most slices first: together for all items, or item by item.

    Args:
        x, y: data and results, as a convolution has them.

    Raises:
        Refused: taps are not 3 × 3 on the last two axes, without strides and gaps, or none meets a slice; or tensors do
            not lie with channels last.
    """
    plain = set(op.strides[1:]) == {1} == set(op.dilations[1:]) and op.groups == 1
    floats = x.type.dtype == FLOAT32 == y.type.dtype
    if len(x.shape) != 5 or tuple(kernel[1:]) != (TAPS, TAPS) or not plain or not floats:
        raise Refused("Winograd's algorithm is for 3 x 3 taps, strides of 1 and multiples of 16 channels")
    if x.shape[1] % LANES or y.shape[1] % LANES:
        raise Refused("Winograd's algorithm is for multiples of 16 channels")
    (low, _), step, gap = op.pads[0], op.strides[0], op.dilations[0]
    found = []
    for depth in range(kernel[0]):
        away = depth * gap - low  # of the slice of x from that of y, times the step
        first = max(0, -(away // step))
        last = min(y.shape[2], (x.shape[2] - 1 - away) // step + 1)
        if last > first:
            begin = first * step + away
            found.append((depth, slice(begin, begin + (last - first - 1) * step + 1, step), slice(first, last, 1)))
    if not found:
        raise Refused("no tap meets a slice")
    found.sort(key=lambda tap: tap[2].start - tap[2].stop)
    return [list(_items(depth, (x, read), (y, written))) for depth, read, written in found]


def _items(depth: int, data: tuple[Window, slice], result: tuple[Window, slice]) -> Iterator[_Tap]:
    """All items at once, if their slices lie at one distance; else each."""
    count, together = data[0].shape[0], [_images(*each, item=None) for each in (data, result)]
    if all(together):
        x, y = together
        assert x is not None and y is not None
        yield _Tap(depth, slice(0, count), (data[1], x), (result[1], y))
        return
    for item in range(count):
        x, y = (_images(*each, item=item) for each in (data, result))
        assert x is not None and y is not None
        yield _Tap(depth, slice(item, item + 1), (data[1], x), (result[1], y))


def _images(x: Window, depths: slice, item: int | None) -> Window | None:
    """Slices of one item, or of all, as images; None if those of all do not lie at one distance.

    Raises:
        Refused: they do not lie with channels last.
    """
    step, count = depths.step, len(range(depths.start, depths.stop, depths.step))
    if item is None:
        if x.shape[0] > 1 and x.strides[0] != count * step * x.strides[2]:
            return None
        count *= x.shape[0]
    found = x.viewed((count, x.shape[1], *x.shape[3:]), (step * x.strides[2], x.strides[1], *x.strides[3:]))
    if x.strides[1] != FLOAT32.itemsize:
        raise Refused(f"{x.type} with the strides {x.strides}")
    return found


def _is_all(depths: slice, x: Window) -> bool:
    """Whether these are all slices of a tensor."""
    return depths == slice(0, x.shape[2], 1)


def _weights(w: Window) -> Window:
    """The weights of one depth."""
    return w.viewed((*w.shape[:2], *w.shape[3:]), (*w.strides[:2], *w.strides[3:]))


def _before(op: ConvOp) -> tuple[int, int]:
    """Zeros before the first row and column of images."""
    return op.pads[1][0], op.pads[2][0]
