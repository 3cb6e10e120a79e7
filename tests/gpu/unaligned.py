"""Kernels whose operands begin at any element, as views do, run on the CPU against the NumPy kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.graph import Op, Window
from tests.gpu.binder import Bound
from tests.gpu.check import Memory, made, type_of
from tests.kernels import assert_near, expected


def check_unaligned(
    op: Op, *inputs: np.ndarray, windows: Sequence[Window] | None = None, rtol: float = 1e-5, atol: float = 1e-5
) -> None:
    """Assert that both kernels agree, while each of the operands in turn begins an element behind an aligned place."""
    kernel, wanted, layouts = made(op, [type_of(x) for x in inputs], windows)
    results, count = expected(op, inputs), len(wanted) + len(layouts)
    for late in range(count):
        operands = [_at(window, int(i == late)) for i, window in enumerate([*wanted, *layouts])]
        arrays = [array for _, array in operands]
        for array, x in zip(arrays, inputs):
            array[...] = x
        workspace = Memory(kernel.workspace, 0xFF)
        given, found = arrays[: len(inputs)], arrays[len(inputs) :]
        Bound(kernel, given, found, workspace.bytes)()
        for memory in (workspace, *(memory for memory, _ in operands)):
            memory.check()
        assert_near(found, results, rtol, atol, f"operand {late} begins late")


def _at(window: Window, first: int) -> tuple[Memory, np.ndarray]:
    """Poisoned memory, and an array that begins so many elements behind its beginning."""
    item = window.type.dtype.itemsize
    span = sum((extent - 1) * step for extent, step in zip(window.shape, window.strides)) + item
    memory = Memory(first * item + span, 0xFF)
    return memory, np.ndarray(window.shape, window.type.dtype.numpy, memory.bytes, first * item, window.strides)
