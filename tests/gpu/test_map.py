"""Maps of a card: elements that move together, bits at any address, copies, many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.types import DTYPES
from foreplan.ops.bits import MaskedMap
from foreplan.ops.map import Map
from foreplan.ops.multi_map import MultiMap
from foreplan.runtime.cuda.launch import Copy, Launch
from foreplan.runtime.cuda.table import kernel_for
from tests.gpu.check import DEVICE, check, made, run, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import as_images, dense, layouts, normal, packed

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]


def test_elements_move_sixteen_bytes_at_a_time_where_they_lie_side_by_side() -> None:
    def vector(*arrays: np.ndarray, windows: Sequence[Window] | None = None, text: str = "(a0 + a1)") -> object:
        kernel, _, _ = made(Map((text,)), [type_of(x) for x in arrays], windows)
        (only,) = kernel.instructions
        assert isinstance(only, Launch)
        return dict(only.source.defines)["VECTOR"]

    x, row = normal(64, 40), normal(20, 1, 1)
    half = x.astype(np.float16)
    assert vector(x, normal(40)) == 4
    assert vector(half, half) == 8
    assert vector(half, x) == 4
    assert vector(normal(64, 3), normal(3)) == 2
    image = normal(2, 20, 5, 7)
    assert vector(image, row, windows=[*as_images(image), *dense(row)]) == 4
    narrow = half.reshape(2, 20, 8, 8)
    scaled = "float16((float32(a0) * a1))"  # a vector of their channels does not make images move by halves
    assert vector(narrow, row, windows=as_images(narrow, row), text=scaled) == 8


def test_what_is_broadcast_or_lies_otherwise_is_never_overwritten() -> None:
    x, row = normal(4, 6, 5, 5), normal(6, 1, 1)
    windows = [*as_images(x), *dense(x, row)]
    kernel, _, found = made(Map(("((a0 + a1) + a2)",)), [w.type for w in windows], windows)
    assert found == windows[:1] and kernel.overwrites == ((0, 0),)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(80,), (5, 48), (3, 24, 3, 5), (1, 12, 3, 2), (1, 20, 2, 2), (2, 6, 2, 2), (2, 4, 1, 3, 3)]
)
def test_bits_that_a_vector_of_any_type_goes_with(shape: tuple[int, ...], dtype: str) -> None:
    x, truth = (50 * normal(*shape)).astype(DTYPES[dtype].numpy), normal(*shape, seed=1) > 0
    for windows in layouts(x):
        for behind in ((), (1,), (3, 1), (0, 0, 1)):
            given = [*dense(packed(truth)), *windows]
            (out,) = run(MaskedMap(("where(a0, a1, a1 - a1)",)), [packed(truth), x], given, behind=behind)
            np.testing.assert_array_equal(out, np.where(truth, x, 0))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", [(2, 8, 3, 3), (1, 16, 4, 4), (3, 37, 5, 9), (2, 40, 1, 33)])
def test_copies_from_one_order_of_axes_to_another(shape: tuple[int, ...], dtype: str) -> None:
    x = (50 * normal(*shape)).astype(DTYPES[dtype].numpy)
    (last,) = as_images(x)
    parted = Window(last.type, (3 * last.strides[0], *last.strides[1:]))
    for windows in ([last], [parted], dense(x)):
        kernel, _, found = made(Map(("a0",)), [last.type], windows)
        (only,) = kernel.instructions
        assert isinstance(only, Copy) == (found == windows)
        check(Map(("a0",)), x, windows=windows, rtol=0, atol=0)


UPDATES = ("(a0 - (a3 * a1))", "((0.9 * a1) + (a4 * a2))")  # of many tensors, in one launch


def operands(*sizes: int) -> list[np.ndarray]:
    tensors = [x for size in sizes for x in normal(3, size)]
    return [*tensors, *(np.array(x, np.float32) for x in (0.01, -3.0))]


def test_tensors_of_many_sizes_in_one_launch() -> None:
    sizes = (5, 128, 1, 129, 1000, 256)
    op, inputs = MultiMap(UPDATES, 3, len(sizes)), operands(*sizes)
    check(op, *inputs, rtol=0, atol=0)
    kernel, _, _ = made(op, [type_of(x) for x in inputs])
    (only,) = kernel.instructions
    assert isinstance(only, Launch) and only.grid[0] == 1 + 1 + 1 + 2 + 8 + 2


def test_results_take_the_bytes_of_their_own_operands() -> None:
    op, inputs = MultiMap(UPDATES, 3, 2), operands(300, 7)
    for t in range(2):
        for o in range(2):
            for i in range(3):
                check(op, *inputs, rtol=0, atol=0, over=(2 * t + o, 3 * t + i))
    kernel, _, _ = made(op, [type_of(x) for x in inputs])
    assert (0, 3) not in kernel.overwrites and (2, 0) not in kernel.overwrites


def test_other_types_no_scalars_and_vectors_with_gaps() -> None:
    op = MultiMap(("float32((a0 + a1))",), 2, 2)
    inputs = [x.astype(type) for x, type in zip(normal(4, 40), (DTYPES["bfloat16"].numpy, np.float32) * 2)]
    gaps = [Window(type_of(x), (3 * x.itemsize,)) for x in inputs]
    check(op, *inputs, rtol=0, atol=0, windows=gaps)


def test_more_than_arguments_hold_are_refused() -> None:
    op, inputs = MultiMap(UPDATES, 3, 80), operands(*[4] * 80)
    windows = dense(*inputs)
    assert kernel_for(op, windows, [Window.dense(y) for y in op.infer([x.type for x in windows])], DEVICE) is None
