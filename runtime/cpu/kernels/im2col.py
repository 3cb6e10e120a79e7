"""Convolutions of several taps at few positions as products: the inputs of each position are gathered first.

Weights are read once, as they lie in checkpoints. With few positions, reading them takes most of the time, and oneDNN's
own convolutions also reorder them before each run. (K. Chellapilla, S. Puri, P. Simard: High performance convolutional
neural networks for document processing, 2006.)
"""

from __future__ import annotations

import numpy as np

from foreplan.graph.op import Arrays
from foreplan.graph.types import Shape
from foreplan.runtime.cpu.codegen.jit import looped
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels.rows import Rows, flat_input
from foreplan.runtime.cpu.kernels.stages import Place, Staged
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Run, one_after_another

GRAIN = 1 << 15  # numbers gathered that are worth a thread of their own


@looped
def _gather(start, stop, x, step, columns, channels, places):  # type: ignore[no-untyped-def]
    height, width, down, across, kh, kw, sh, sw, top, left, dh, dw = places
    taps = kh * kw
    for q in range(start, stop):
        n, o, p = q // across // down, q // across % down, q % across
        seen = columns[q * channels * taps : (q + 1) * channels * taps]
        for tap in range(taps):
            h, w = o * sh - top + tap // kw * dh, p * sw - left + tap % kw * dw
            if 0 <= h < height and 0 <= w < width:
                place = ((n * height + h) * width + w) * step
                row = x[place : place + channels]
                for c in range(channels):
                    seen[c * taps + tap] = row[c]
            else:
                for c in range(channels):
                    seen[c * taps + tap] = 0


def gathered(x: Rows, positions: int, places: Shape, taps: int, columns: Place, product: Staged) -> LoopKernel:
    """A convolution as a product of gathered inputs.

    Args:
        x: the images as rows of channels.
        positions: of windows, in all images.
        places: of windows, as `pool.Places` has them.
        columns: scratch memory, a row for each position, with a number for each channel and tap.
        product: with its epilogue.
    """
    row = x.width * taps

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        (workspace,) = scratch
        seen = workspace[columns[2] :].view(np.float32)[: positions * row]
        given = (flat_input(inputs[0]), x.step, seen, x.width, places)
        gather = ranged(_gather, positions, max(1, GRAIN // row), current_threads(), *given)
        return one_after_another(gather, product.bind(inputs, outputs, workspace))

    pieces = (((product.workspace,), np.dtype(np.uint8)),)
    return LoopKernel(loops, pieces, product.overwrites, nanoseconds=product.nanoseconds)
