"""Matrix products within a kernel: each is described once and bound to its operands; all share one scratch memory."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from foreplan.graph import DType, TensorType, Window, as_dtype
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.gemm.blocked import Blocked
from foreplan.runtime.cpu.gemm.panels import Panels
from foreplan.runtime.cpu.gemm.parts import Parts, product_in_parts
from foreplan.runtime.cpu.gemm.tiles import Tiles
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.layouts import stepped
from foreplan.runtime.cpu.onednn.primitives import Primitive, onto
from foreplan.runtime.kernel import Refused, Run

Product = Primitive | Parts | Blocked
_Key = tuple[Window, Window, Window, bool]


def product(a: Window, b: Window, y: Window, add: bool = False, *, alone: bool = False) -> Product:
    """y = a·b, or y += a·b, in the way with the least predicted time.

    Args:
        alone: the thread that runs it does all of it.

    Raises:
        Refused: there is no such product.
    """
    for way in (Tiles, Panels):
        with suppress(Refused):
            made = way(a, b, y, add=add)
            if made.nanoseconds < prices.product(a, b, y):
                return made
    return primitives.matmul(a, b, y, onto(add)) if alone else product_in_parts(a, b, y, add)


class Products:
    """The products of matrices that one kernel makes.

    Attributes:
        scratchpad: bytes of scratch memory that the largest needs, as one runs at a time.
    """

    def __init__(self) -> None:
        self.scratchpad = 0
        self._made: dict[_Key, Product] = {}

    def describe(self, a: Window, b: Window, y: Window, add: bool = False) -> int:
        """Make y = a·b, or y += a·b, available to `bind`.

        Returns:
            Its predicted time in nanoseconds.

        Raises:
            Refused: there is no such product.
        """
        key = (stepped(a), stepped(b), stepped(y), add)
        if key not in self._made:
            made = self._made[key] = product(*key)
            self.scratchpad = max(self.scratchpad, made.scratchpad)
        made = self._made[key]
        return made.nanoseconds if isinstance(made, Blocked) else prices.product(a, b, y)

    def bind(self, a: np.ndarray, b: np.ndarray, y: np.ndarray, scratch: np.ndarray, add: bool = False) -> Run:
        """A call that computes a described product on these arrays."""
        made = self._made[stepped(window_of(a)), stepped(window_of(b)), stepped(window_of(y)), add]
        addresses = {c.SRC: a.ctypes.data, c.WEIGHTS: b.ctypes.data, c.DST: y.ctypes.data}
        if made.scratchpad:
            addresses[c.SCRATCHPAD] = scratch.ctypes.data
        return made.bind(addresses)


def window_of(array: np.ndarray) -> Window:
    """The window of an array."""
    return Window(TensorType(as_dtype(array.dtype), array.shape), array.strides)


def matrix(rows: int, columns: int, dtype: DType = FLOAT32) -> Window:
    """A dense matrix."""
    return Window.dense(TensorType(dtype, (rows, columns)))
