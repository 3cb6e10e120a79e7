"""`map`, `masked_map` and `pack_bits` as compiled loops over tensors however they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph import DType, Op, TensorType, Window
from foreplan.graph.layouts import channels_last, lie_alike
from foreplan.graph.op import Types, Windows
from foreplan.graph.types import BOOL, Shape
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.map import Map, merged_axes
from foreplan.runtime.cpu.codegen.loops import BITS, Operand, bits_kind, operand_kind
from foreplan.runtime.cpu.codegen.maps import UNIT, Loop, compiled_loop
from foreplan.runtime.cpu.codegen.transpose import Axis, transposition
from foreplan.runtime.cpu.kernel import CpuKernel
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Run

PART = 32 * 1024  # elements that are worth a thread


@dataclass(frozen=True)
class _Tensor:
    """An operand: strides in bytes along each axis of the loop's shape, 0 where it is broadcast; of bits, in bits."""

    dtype: DType
    strides: tuple[int, ...]
    bits: bool = False


@dataclass(frozen=True)
class Elementwise:
    """Expressions over tensors of one shape.

    Attributes:
        overwrites: outputs that lie as an input does may take its bytes.
    """

    exprs: tuple[str, ...]
    shape: Shape
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]
    overwrites: tuple[tuple[int, int], ...]
    workspace: int = 0

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """The loop, compiled when it is first asked for."""
        if not math.prod(self.shape):
            return _nothing
        tensors = (*self.inputs, *self.outputs)
        axes = merged_axes(self.shape, [x.strides for x in tensors], self._order())
        rows = math.prod(extent for extent, _ in axes[:-1])
        inner = axes[-1][0]
        strides = [[steps[i] for _, steps in axes] for i in range(len(tensors))]
        kinds = [_kind(x, steps) for x, steps in zip(tensors, strides)]
        loop = Loop(self.exprs, tuple(kinds[: len(inputs)]), tuple(kinds[len(inputs) :]), len(axes))
        table = [extent for extent, _ in axes]
        for array, steps in zip((*inputs, *outputs), strides):
            table += [array.ctypes.data, *steps]
        count, grain = (-(-inner // UNIT), PART // UNIT) if len(axes) == 1 else (rows, -(-PART // inner))
        packed = np.array(table, np.int64).tobytes()
        return ranged(compiled_loop(loop), count, grain, current_threads(), packed)

    def _order(self) -> list[int]:
        """Axes as they lie in the first output's memory, or, of bits, the input's; the innermost last."""
        leader = self.inputs[0] if self.outputs[0].bits else self.outputs[0]
        return sorted(range(len(self.shape)), key=lambda axis: -abs(leader.strides[axis]))


def _nothing() -> None:
    """There is no element."""


def _kind(x: _Tensor, strides: Sequence[int]) -> Operand:
    return bits_kind(strides) if x.bits else operand_kind(x.dtype, strides[-1])


def _broadcast(window: Window, shape: Shape) -> _Tensor:
    return _Tensor(window.type.dtype, window.broadcast(shape).strides)


def _whole(window: Window) -> _Tensor:
    """An output, whose single elements are as long as their neighbours are apart."""
    return _Tensor(window.type.dtype, window.strides)


def _mask(shape: Shape) -> _Tensor:
    """A mask's bits: channels last of four axes, else in C order."""
    order = channels_last(TensorType(BOOL, shape))
    return _Tensor(BOOL, order.strides, bits=True)


def _alike(allowed: Sequence[tuple[int, int]], inputs: Windows, outputs: Windows) -> tuple[tuple[int, int], ...]:
    """The pairs of an output and an input that lie in the same way."""
    return tuple((o, i) for o, i in allowed if lie_alike(inputs[i], outputs[o]))


def _pairs(inputs: Windows, outputs: Windows, first: int = 0) -> tuple[tuple[int, int], ...]:
    return _alike([(o, i) for o in range(len(outputs)) for i in range(first, len(inputs))], inputs, outputs)


def elementwise(op: Op, inputs: Windows, outputs: Windows) -> CpuKernel:
    """The loop of a map; of one that copies from one order of the axes to another, tiles."""
    assert isinstance(op, Map)
    shape = outputs[0].shape
    tensors = tuple(_broadcast(x, shape) for x in inputs)
    if op.exprs == ("a0",) and outputs[0].type.size:
        strides = [tensors[0].strides, outputs[0].strides]
        order = sorted(range(len(shape)), key=lambda axis: -abs(outputs[0].strides[axis]))
        axes = [Axis(extent, *steps) for extent, steps in merged_axes(shape, strides, order)]
        tiled = transposition(inputs[0].type.dtype, axes)
        if tiled is not None:
            return tiled
    return Elementwise(op.exprs, shape, tensors, tuple(_whole(y) for y in outputs), _pairs(inputs, outputs))


def masked(op: Op, inputs: Windows, outputs: Windows) -> Elementwise:
    """The loop of a map whose first input is a mask."""
    assert isinstance(op, MaskedMap)
    shape = outputs[0].shape
    tensors = (_mask(shape), *(_broadcast(x, shape) for x in inputs[1:]))
    return Elementwise(op.exprs, shape, tensors, tuple(_whole(y) for y in outputs), _pairs(inputs, outputs, 1))


def pack(op: Op, inputs: Windows, outputs: Windows) -> Elementwise:
    """The loop that makes a mask."""
    assert isinstance(op, PackBits)
    (x,) = inputs
    return Elementwise((op.condition,), x.shape, (_broadcast(x, x.shape),), (_mask(x.shape),), ())


def pack_layout(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """A row of bytes."""
    return [Window.dense(type) for type in outputs]


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies, whatever that is; a mask is a row of bytes in any case."""
    return window


def pack_reads(op: Op, index: int, window: Window) -> Window:
    """As it lies, where the bits of each row begin with a byte; else as the mask's bits lie."""
    made = pack(op, [window], [])
    order = sorted(range(len(window.shape)), key=lambda axis: -abs(window.strides[axis]))
    axes = merged_axes(window.shape, [made.inputs[0].strides, made.outputs[0].strides], order)
    rows = [steps[1] for _, steps in axes]
    return window if bits_kind(rows).kind == BITS or not window.type.size else channels_last(window.type)
