"""Kernels of bfloat16 as kernels of float32: processors without AMX multiply bfloat16 more slowly, or not at all.

Operands are copied to float32 in the workspace, the kernel runs on the copies, and its results are rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foreplan.graph import Op, Window, as_dtype
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Arrays, Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.blocks import Piece
from foreplan.ops.map import Map
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.kernel import LoopKernel, Make
from foreplan.runtime.cpu.kernels.elementwise import elementwise
from foreplan.runtime.kernel import Run, one_after_another

NARROW = as_dtype("bfloat16")
_WIDEN, _ROUND = Map(("float32(a0)",)), Map(("bfloat16(a0)",))
_NOTHING = np.empty(0, np.uint8)


def has_narrow(inputs: Windows, outputs: Windows) -> bool:
    """Whether there is a tensor of bfloat16."""
    return any(x.type.dtype == NARROW for x in (*inputs, *outputs))


def widened(make: Make, op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The kernel that `make` makes for float32, between conversions of all operands of bfloat16.

    Raises:
        Refused: it makes none.
    """
    tensors, count = (*inputs, *outputs), len(inputs)
    wide = [_wide(x) for x in tensors]
    inner = make(op, wide[:count], wide[count:])
    narrow = [i for i, x in enumerate(tensors) if x.type.dtype == NARROW]
    places = {i: i for i in narrow}  # the tensor in whose copy each one lies
    for o, i in inner.overwrites:
        taken = list(places.values()).count(i) > 1
        if not taken and {i, count + o} <= places.keys() and lie_alike(wide[i], wide[count + o]):
            places[count + o] = i
    pieces: list[Piece] = [
        ((math.prod(x.shape) if places.get(i) == i else 0,), FLOAT32.numpy) for i, x in enumerate(tensors)
    ]
    pieces.append(((inner.workspace,), np.dtype(np.uint8)))

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        given = (*inputs, *outputs)
        arrays = [
            np.ndarray(x.shape, np.float32, scratch[places[i]], 0, x.strides) if i in places else given[i]
            for i, x in enumerate(wide)
        ]
        runs = [_converted(_WIDEN, given[i], arrays[i], tensors[i], wide[i]) for i in narrow if i < count]
        runs.append(inner.bind(arrays[:count], arrays[count:], scratch[-1]))
        runs += [_converted(_ROUND, arrays[i], given[i], wide[i], tensors[i]) for i in narrow if i >= count]
        return one_after_another(*runs)

    cost = getattr(inner, "nanoseconds", None)
    if cost is not None:
        cost += prices.converted([tensors[i] for i in narrow])
    return LoopKernel(loops, tuple(pieces), _overwrites(inputs, outputs, inner.overwrites), nanoseconds=cost)


def _overwrites(inputs: Windows, outputs: Windows, inner: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Those of the kernel between tensors of float32; and a result of bfloat16, which is written when everything has
    been read, may take the bytes of any operand that lies like it.
    """
    kept = [(o, i) for o, i in inner if inputs[i].type.dtype == outputs[o].type.dtype == FLOAT32]
    rounded = [o for o, y in enumerate(outputs) if y.type.dtype == NARROW]
    return (*kept, *((o, i) for o in rounded for i, x in enumerate(inputs) if lie_alike(x, outputs[o])))


def _wide(x: Window) -> Window:
    """A tensor of bfloat16 in float32, its axes in the same order and without gaps; others as they lie."""
    if x.type.dtype != NARROW:
        return x
    type, item = x.type.with_dtype(FLOAT32), x.type.dtype.itemsize
    if x.is_compact:
        return Window(type, tuple(step // item * FLOAT32.itemsize for step in x.strides))
    if any(extent > 1 and step <= 0 for extent, step in zip(x.shape, x.strides)):
        return Window.dense(type)
    order, strides, step = sorted(range(type.rank), key=lambda axis: x.strides[axis]), [0] * type.rank, FLOAT32.itemsize
    for axis in order:
        strides[axis] = step
        step *= x.shape[axis]
    return Window(type, tuple(strides))


def _converted(op: Map, source: np.ndarray, target: np.ndarray, given: Window, made: Window) -> Run:
    return elementwise(op, [given], [made]).bind([source], [target], _NOTHING)
