"""Convolutions of several taps at few positions as products: what the taps of a position see is gathered first.

Weights are read once, as they lie in checkpoints: where positions are few that is most of the time, and oneDNN's own
convolutions reorder them before each run. (K. Chellapilla, S. Puri, P. Simard: High performance convolutional neural
networks for document processing, 2006.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan import jit
from foreplan.graph.types import Shape
from foreplan.runtime.cpu.kernel import one_after_another
from foreplan.runtime.cpu.kernels.rows import Rows, flat_input
from foreplan.runtime.cpu.kernels.stages import Place, Staged
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Run

GRAIN = 1 << 15  # numbers gathered that are worth a thread of their own


@jit.compiled(nogil=True)
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


@dataclass(frozen=True)
class Gathered:
    """A convolution as a product of what is gathered.

    Attributes:
        x: the images as rows of channels.
        positions: of windows, in all images.
        places: of windows, as `pool.Places` has them.
        columns: where a row a position lies in scratch memory, a number a channel and tap.
        product: and what follows it.
    """

    x: Rows
    positions: int
    places: Shape
    taps: int
    columns: Place
    product: Staged

    @property
    def workspace(self) -> int:
        """What is gathered, and what the product needs."""
        return self.product.workspace

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """What is added to may be changed in place."""
        return self.product.overwrites

    @property
    def nanoseconds(self) -> int | None:
        """Predicted."""
        return self.product.nanoseconds

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """The gathering, and the product."""
        row = self.x.width * self.taps
        columns = workspace[self.columns[2] :].view(np.float32)[: self.positions * row]
        given = (flat_input(inputs[0]), self.x.step, columns, self.x.width, self.places)
        gather = ranged(_gather, self.positions, max(1, GRAIN // row), current_threads(), *given)
        return one_after_another(gather, self.product.bind(inputs, outputs, workspace))
