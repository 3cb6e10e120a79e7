"""Tensors copied from one order of axes to another."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import DTYPES
from foreplan.runtime.cuda.kernels.copies import transposition
from foreplan.runtime.cuda.launch import LaunchKernel, input_at, output_at
from tests.gpu.binder import Bound
from tests.gpu.check import laid_out
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
# shape, then axes of the source and of the target from the outermost to the innermost
CASES = {
    "a tile": ((64, 64), (0, 1), (1, 0)),
    "less than a tile": ((8, 9), (1, 0), (0, 1)),
    "odd extents": ((65, 131), (0, 1), (1, 0)),
    "images": ((2, 33, 5, 9), (0, 2, 3, 1), (0, 1, 2, 3)),
    "channels last": ((3, 70, 3, 11), (0, 1, 2, 3), (0, 2, 3, 1)),
    "axes between": ((40, 3, 2, 66), (3, 1, 2, 0), (2, 0, 1, 3)),
}


def lying(type: TensorType, order: tuple[int, ...], gap: int) -> Window:
    """A tensor's axes in this order, with the given number of elements between its innermost rows."""
    strides, step = [0] * type.rank, type.dtype.itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= type.shape[axis]
        if axis == order[-1]:
            step += gap * type.dtype.itemsize
    return Window(type, tuple(strides))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("case", CASES)
def test_axes_in_another_order(case: str, dtype: str) -> None:
    shape, first, second = CASES[case]
    type = TensorType(DTYPES[dtype], shape)
    x = np.random.default_rng(0).integers(0, 255, shape).astype(type.dtype.numpy)
    for gaps in ((0, 0), (1, 3)):
        source, target = (lying(type, order, gap) for order, gap in zip((first, second), gaps))
        found = transposition(input_at(0), source, output_at(0), target)
        assert found is not None
        for reverse in (False, True):
            (before, given), (behind, y) = laid_out(source, x), laid_out(target)
            Bound(LaunchKernel(found), [given], [y], np.zeros(0, np.uint8), reverse)()
            before.check(), behind.check()
            np.testing.assert_array_equal(y, x)
