"""`map`, `masked_map` and `pack_bits` as compiled loops over tensors of any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph import DType, Op, TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.op import Arrays, Types, Windows
from foreplan.graph.types import BOOL, Shape
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.map import Map, merged_axes
from foreplan.runtime.cpu.codegen.loops import BITS, Operand, bits_kind, operand_kind
from foreplan.runtime.cpu.codegen.maps import UNIT, Loop, compiled_loop
from foreplan.runtime.cpu.codegen.transpose import Axis, transposition
from foreplan.runtime.cpu.kernel import CpuKernel, LoopKernel
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Run, pairs_alike

IMAGES = (4, 5)  # numbers of axes of images whose masks are in the order of channels last
PART = 32 * 1024  # elements that are worth a thread


@dataclass(frozen=True)
class _Tensor:
    """An operand: strides in bytes along each axis of the loop's shape, 0 where it is broadcast; of bits, in bits."""

    dtype: DType
    strides: tuple[int, ...]
    bits: bool = False


def _elementwise(
    exprs: tuple[str, ...],
    shape: Shape,
    given: Sequence[_Tensor],
    made: Sequence[_Tensor],
    overwrites: tuple[tuple[int, int], ...] = (),
) -> LoopKernel:
    """The loop of expressions over tensors of one shape, compiled when it is first bound.

    Args:
        overwrites: outputs that lie as an input does may take its bytes.
    """

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        if not math.prod(shape):
            return _nothing
        # The order of axes in the first output's memory (for bits, the input's); the innermost last.
        leader = given[0] if made[0].bits else made[0]
        order = sorted(range(len(shape)), key=lambda axis: -abs(leader.strides[axis]))
        tensors = (*given, *made)
        axes = merged_axes(shape, [x.strides for x in tensors], order)
        rows = math.prod(extent for extent, _ in axes[:-1])
        inner = axes[-1][0]
        strides = [[steps[i] for _, steps in axes] for i in range(len(tensors))]
        kinds = [_kind(x, steps) for x, steps in zip(tensors, strides)]
        loop = Loop(exprs, tuple(kinds[: len(inputs)]), tuple(kinds[len(inputs) :]), len(axes))
        table = [extent for extent, _ in axes]
        for array, steps in zip((*inputs, *outputs), strides):
            table += [array.ctypes.data, *steps]
        count, grain = (-(-inner // UNIT), PART // UNIT) if len(axes) == 1 else (rows, -(-PART // inner))
        packed = np.array(table, np.int64).tobytes()
        return ranged(compiled_loop(loop), count, grain, current_threads(), packed)

    return LoopKernel(loops, overwrites=overwrites)


def _nothing() -> None:
    """Do nothing, as there is no element."""


def _kind(x: _Tensor, strides: Sequence[int]) -> Operand:
    return bits_kind(strides) if x.bits else operand_kind(x.dtype, strides[-1])


def _broadcast(window: Window, shape: Shape) -> _Tensor:
    return _Tensor(window.type.dtype, window.broadcast(shape).strides)


def _whole(window: Window) -> _Tensor:
    """An output, whose single elements are as long as their neighbours are apart."""
    return _Tensor(window.type.dtype, window.strides)


def _mask(shape: Shape) -> _Tensor:
    """A mask's bits."""
    return _Tensor(BOOL, mask_order(TensorType(BOOL, shape)).strides, bits=True)


def mask_order(type: TensorType) -> Window:
    """The order of a mask's bits: of images of two or three axes with their channels last; else C order, as of
    sequences [N, T, D].
    """
    return channels_last(type) if type.rank in IMAGES else Window.dense(type)


def elementwise(op: Op, inputs: Windows, outputs: Windows) -> CpuKernel:
    """The loop of a map; a map that copies from one order of axes to another works by tiles."""
    assert isinstance(op, Map)
    shape = outputs[0].shape
    tensors = [_broadcast(x, shape) for x in inputs]
    if op.exprs == ("a0",) and outputs[0].type.size:
        strides = [tensors[0].strides, outputs[0].strides]
        order = sorted(range(len(shape)), key=lambda axis: -abs(outputs[0].strides[axis]))
        axes = [Axis(extent, *steps) for extent, steps in merged_axes(shape, strides, order)]
        tiled = transposition(inputs[0].type.dtype, axes)
        if tiled is not None:
            return tiled
    return _elementwise(op.exprs, shape, tensors, [_whole(y) for y in outputs], pairs_alike(inputs, outputs))


def masked(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The loop of a map whose first input is a mask."""
    assert isinstance(op, MaskedMap)
    shape = outputs[0].shape
    tensors = [_mask(shape), *(_broadcast(x, shape) for x in inputs[1:])]
    return _elementwise(op.exprs, shape, tensors, [_whole(y) for y in outputs], pairs_alike(inputs, outputs, 1))


def pack(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The loop that makes a mask."""
    assert isinstance(op, PackBits)
    (x,) = inputs
    return _elementwise((op.condition,), x.shape, [_broadcast(x, x.shape)], [_mask(x.shape)])


def pack_layout(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """A row of bytes."""
    return [Window.dense(type) for type in outputs]


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies, in any layout; a mask is always a row of bytes."""
    return window


def pack_reads(op: Op, index: int, window: Window) -> Window:
    """As it lies, if the bits of each row begin with a byte; else with the layout of the mask's bits."""
    order = sorted(range(len(window.shape)), key=lambda axis: -abs(window.strides[axis]))
    axes = merged_axes(window.shape, [window.strides, _mask(window.shape).strides], order)
    rows = [steps[1] for _, steps in axes]
    return window if bits_kind(rows).kind == BITS or not window.type.size else mask_order(window.type)
