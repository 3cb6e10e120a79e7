"""Products by oneDNN in parts that depend on shapes alone, so that results do not depend on the number of threads.

Without AVX-512, oneDNN's products (`gemm:jit`) cut a long sum into parts for the threads that a small result leaves
idle. Here each part is some columns, rows or matrices of the result, and one thread computes the whole of its sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from foreplan.base.units import align_up
from foreplan.graph import Window
from foreplan.runtime.cpu.codegen.native import together
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.primitives import Primitive, onto
from foreplan.runtime.cpu.threads import current_threads, one_thread, threads_set
from foreplan.runtime.kernel import Run, one_after_another

WORTH = 2**22  # multiplications that are worth a part
SIDE = 16  # a part's columns or rows are a multiple of this, but for the last one's
LEAST = 64  # columns or rows of a part
CUTS_SUMS = "gemm:jit"  # in the names of oneDNN's code for products that does


def product_in_parts(a: Window, b: Window, y: Window, add: bool = False) -> Primitive | Parts:
    """y = a·b, or y += a·b: oneDNN's own for all threads, unless that cuts sums.

    Raises:
        Refused: oneDNN has no such product.
    """
    made = primitives.matmul(a, b, y, onto(add))
    return Parts(a, b, y, add) if CUTS_SUMS in made.implementation else made


class Parts:
    """A product of matrices, or several, in parts; bound like a primitive of oneDNN.

    Attributes:
        scratchpad: bytes of scratch memory for all threads.
    """

    def __init__(self, a: Window, b: Window, y: Window, add: bool) -> None:
        rank = len(y.shape)
        longer = rank - 1 if y.shape[-1] >= y.shape[-2] else rank - 2
        self.axis = 0 if rank > 2 and y.shape[0] > 1 else longer
        self.a, self.b, self.y = a, b, y
        self.ranges = list(_ranges(y.shape[self.axis], self.axis >= rank - 2, y.type.size * a.shape[-1]))
        self.threads = min(current_threads(), len(self.ranges))
        with one_thread():
            self.primitives = {count: self._some(count, add) for count in {high - low for low, high in self.ranges}}
        self.each = align_up(max(made.scratchpad for made in self.primitives.values()), 64)
        self.scratchpad = self.each * self.threads

    def _some(self, count: int, add: bool) -> Primitive:
        """The product of a part."""
        a, b, y = (
            x if step == 0 else x.viewed((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.strides)
            for x, axis, step in self._cut()
        )
        return primitives.matmul(a, b, y, onto(add))

    def _cut(self) -> list[tuple[Window, int, int]]:
        """The operands and the result, each with the axis that is cut and the bytes to its next entry; 0: it is whole
        in every part.
        """
        rank, found = len(self.y.shape), []
        for x, whole in ((self.a, rank - 1), (self.b, rank - 2), (self.y, rank)):
            axis = self.axis - rank + len(x.shape)
            cut = self.axis != whole and axis >= 0 and x.shape[axis] > 1
            found.append((x, axis, x.strides[axis] if cut else 0))
        return found

    def bind(self, addresses: Mapping[int, int]) -> Run:
        """A call of the product on these addresses: `SRC`, `WEIGHTS`, `DST` and perhaps `SCRATCHPAD`."""
        steps = dict(zip((c.SRC, c.WEIGHTS, c.DST), (step for _, _, step in self._cut())))
        shares: list[Run] = []
        for thread in range(self.threads):
            calls = []
            for low, high in self.ranges[thread :: self.threads]:
                places = {argument: addresses[argument] + low * step for argument, step in steps.items()}
                if self.each:
                    places[c.SCRATCHPAD] = addresses[c.SCRATCHPAD] + thread * self.each
                calls.append(self.primitives[high - low].bind(places))
            shares.append(one_after_another(*calls))
        threads = current_threads()
        if self.threads > 1 or threads == 1:
            return together(shares)
        # It asks for the number of threads as it runs; within a team, each thread is one.
        return one_after_another(threads_set(1), *shares, threads_set(threads))


def _ranges(extent: int, is_side: bool, operations: int) -> Iterator[tuple[int, int]]:
    """The parts of an axis."""
    step, least = (SIDE, LEAST) if is_side else (1, 1)
    count = max(1, min(operations // WORTH, extent // least))
    bounds = [extent // step * i // count * step for i in range(count)]
    yield from pairwise([*bounds, extent])
