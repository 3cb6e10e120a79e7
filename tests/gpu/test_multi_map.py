"""One map of many small tensors against NumPy's, in one launch."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from foreplan.graph import Window
from foreplan.ops.multi_map import MultiMap
from foreplan.runtime.cuda.launch import Launch
from foreplan.runtime.cuda.table import kernel_for
from tests.gpu.check import DEVICE, check, made, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)
UPDATE = ("(a0 - (a3 * a1))", "((0.9 * a1) + (a4 * a2))")


def operands(*sizes: int) -> list[np.ndarray]:
    tensors = [RNG.standard_normal(size).astype(np.float32) for size in sizes for _ in range(3)]
    return [*tensors, *(np.array(x, np.float32) for x in (0.01, -3.0))]


def test_tensors_of_many_sizes_in_one_launch() -> None:
    sizes = (5, 128, 1, 129, 1000, 256)
    op, inputs = MultiMap(UPDATE, 3, len(sizes)), operands(*sizes)
    check(op, *inputs, rtol=0, atol=0)
    kernel, _, _ = made(op, [type_of(x) for x in inputs])
    (only,) = kernel.instructions
    assert isinstance(only, Launch) and only.grid[0] == 1 + 1 + 1 + 2 + 8 + 2


def test_results_take_the_bytes_of_their_own_operands() -> None:
    op, inputs = MultiMap(UPDATE, 3, 2), operands(300, 7)
    for t in range(2):
        for o in range(2):
            for i in range(3):
                check(op, *inputs, rtol=0, atol=0, over=(2 * t + o, 3 * t + i))
    kernel, _, _ = made(op, [type_of(x) for x in inputs])
    assert (0, 3) not in kernel.overwrites and (2, 0) not in kernel.overwrites


def test_other_types_no_scalars_and_vectors_with_gaps() -> None:
    op = MultiMap(("float32((a0 + a1))",), 2, 2)
    narrow = [RNG.standard_normal(40).astype(ml_dtypes.bfloat16) for _ in range(2)]
    wide = [RNG.standard_normal(40).astype(np.float32) for _ in range(2)]
    inputs = [narrow[0], wide[0], narrow[1], wide[1]]
    gaps = [Window(type_of(x), (3 * x.itemsize,)) for x in inputs]
    check(op, *inputs, rtol=0, atol=0, windows=gaps)


def test_more_than_arguments_hold_are_refused() -> None:
    op, inputs = MultiMap(UPDATE, 3, 80), operands(*[4] * 80)
    windows = [Window.dense(type_of(x)) for x in inputs]
    assert kernel_for(op, windows, [Window.dense(y) for y in op.infer([x.type for x in windows])], DEVICE) is None
