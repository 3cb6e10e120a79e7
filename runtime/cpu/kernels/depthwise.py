"""Depth-wise convolutions of float32 images with channels last, each channel by itself, with any epilogue."""

from __future__ import annotations

from functools import partial

import numpy as np

from foreplan.base.units import align_up
from foreplan.graph import Op, TensorType, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.op import Arrays, Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv
from foreplan.ops.expr import Arg, parse_expr, substitute, used_args
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import FURTHER, Made, entries_of
from foreplan.runtime.cpu.codegen.jit import looped
from foreplan.runtime.cpu.codegen.loops import WIDTH
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.convolution import as_rows
from foreplan.runtime.cpu.kernels.depthwise_loop import ENTRIES, Form, compiled_depthwise
from foreplan.runtime.cpu.kernels.rows import rows_along
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run, one_after_another

TAPS = 49  # at most
GRAIN = 1 << 15  # results that are worth a thread


@looped
def _packed(start, stop, w, taps, filled, places):  # type: ignore[no-untyped-def]
    """Weights [channels, taps] as [taps, channels], `filled` of them."""
    for channel in range(start, stop):
        for tap in range(taps):
            places[tap * filled + channel] = w[channel * taps + tap]


def depthwise(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """A convolution with one channel a group, a bias or something it is added to, and any map of its result."""
    assert isinstance(op, Conv | ConvMap)
    x, w, y = inputs[0], inputs[1], outputs[0]
    channels, taps = x.shape[1], tuple(w.shape[2:])
    plain = len(x.shape) == 4 and op.groups == channels == y.shape[1] and w.shape[1] == 1
    floats = all(each.type.dtype == FLOAT32 for each in (x, w, y)) and x.type.size > 0 and y.type.size > 0
    if level() < Level.AVX2 or not plain or not floats or min(pad for pads in op.pads for pad in pads) < 0:
        raise Refused("this way is for depth-wise convolutions of float32 images of two axes")
    rows, count = rows_along(y, 1), int(np.prod(taps))
    blocks, filled = Blocks((channels, count), f"bA{WIDTH}a"), align_up(channels, WIDTH)
    lies = w.blocks == blocks if w.blocks is not None else w.is_dense
    if rows is None or x.strides[1] != FLOAT32.itemsize or min(x.strides) < 0 or not lies or count > TAPS:
        raise Refused(f"{x.type} with the strides {x.strides}, {w.type}, {y.type} with the strides {y.strides}")
    matrix = (y.type.size // channels, channels)
    wide = Window(TensorType(FLOAT32, matrix), (rows.step * FLOAT32.itemsize, FLOAT32.itemsize))
    made = Made((_epilogue(op, len(inputs)),), tuple(as_rows(z, y) for z in inputs[2:]), (wide,))
    form = Form((taps[0], taps[1]), (op.strides[0], op.strides[1]), (op.dilations[0], op.dilations[1]), made.then)
    (above, _), (left, _) = op.pads

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        weights, threads = inputs[1] if w.blocks is not None else scratch[0], current_threads()
        numbers = {
            "x": inputs[0].ctypes.data, "x_image": x.strides[0], "x_row": x.strides[2], "x_column": x.strides[3],
            "w": weights.ctypes.data, "w_tap": filled * FLOAT32.itemsize, "height": x.shape[2], "width": x.shape[3],
            "tall": y.shape[2], "broad": y.shape[3], "above": above, "left": left, "channels": channels,
        }  # fmt: skip
        addresses = {c.DST: outputs[0].ctypes.data}
        addresses |= {FURTHER + i: each.ctypes.data for i, each in enumerate(inputs[2:])}
        table = np.array([*(numbers[name] for name in ENTRIES), *entries_of(made, addresses)], np.int64).tobytes()
        each = max(1, GRAIN // (y.shape[3] * channels))
        run = ranged(compiled_depthwise(form), y.shape[0] * y.shape[2], each, threads, table)
        if w.blocks is not None:
            return run
        return one_after_another(partial(_packed, 0, channels, inputs[1].reshape(-1), count, filled, weights), run)

    piece = ((count * filled if w.blocks is None else 0,), np.dtype(np.float32))
    cost = prices.depthwise(w, y, x) + prices.mapped(made.beside)
    return LoopKernel(loops, (piece,), made.overwrites(2), (), cost, None if w.blocks is not None else blocks)


def _epilogue(op: Conv | ConvMap, inputs: int) -> str:
    """The map of a result, over everything that follows the weights."""
    if isinstance(op, Conv):
        return "(a0 + a1)" if inputs > 2 else "a0"
    expr = parse_expr(op.expr)
    if not op.biased:
        return op.expr
    further = max(used_args(expr), default=0)
    return str(substitute(expr, [Arg(0) + Arg(1), *(Arg(i + 2) for i in range(further))]))
