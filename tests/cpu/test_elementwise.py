"""How results of compiled maps lie, which operands they overwrite, copies between orders of axes, and threads."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window, as_dtype
from foreplan.graph.layouts import channels_last
from foreplan.ops.map import Map
from foreplan.runtime.cpu.codegen.transpose import Transposition
from foreplan.runtime.cpu.table import family_of
from foreplan.runtime.cpu.threads import set_threads
from tests.cpu.check import kernel_for, laid_out, needs_onednn, type_of
from tests.kernels import as_images, dense, normal

pytestmark = needs_onednn()


def test_outputs_lie_as_the_whole_inputs_do() -> None:
    x, y = normal(2, 2, 8, 3, 4)
    types = [type_of(x), type_of(y)]
    for op in (Map(("(a0 + a1)",)), Map(("(a0 < a1)", "float64(a0)"))):
        results = op.infer(types)
        family = family_of(op, types, results, 1)
        assert family is not None
        last = [channels_last(result) for result in results]
        assert family.layout(op, as_images(x, y), results) == last
        assert family.layout(op, [*dense(x), *as_images(y)], results) == last
        assert family.layout(op, dense(x, y), results) == [Window.dense(result) for result in results]


def test_two_outputs_take_the_bytes_of_each_others_inputs() -> None:
    x, y = normal(2, 64, 33)
    kernel = kernel_for(Map(("a1", "a0")), dense(x, y), dense(x, y), 1)
    assert kernel is not None and set(kernel.overwrites) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    a, b = x.copy(), y.copy()
    kernel.bind([a, b], [a, b], np.zeros(0, np.uint8))()
    np.testing.assert_array_equal(a, y)
    np.testing.assert_array_equal(b, x)


def test_what_is_broadcast_or_lies_otherwise_is_never_overwritten() -> None:
    x, row = normal(4, 6, 5, 5), normal(6, 1, 1)
    kernel = kernel_for(Map(("((a0 + a1) + a2)",)), [*as_images(x), *dense(x, row)], as_images(x), 1)
    assert kernel is not None and kernel.overwrites == ((0, 0),)


def check_copy(x: np.ndarray, source: Window, target: Window, threads: int = 1) -> None:
    """Assert that a transposition copies what lies in one way to where it lies in the other."""
    kernel = kernel_for(Map(("a0",)), [source], [target], threads)
    assert isinstance(kernel, Transposition) and kernel.overwrites == ()
    set_threads(threads)
    out = laid_out(np.zeros_like(x), target)
    kernel.bind([laid_out(x, source)], [out], np.zeros(0, np.uint8))()
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "bool", "int64"])
@pytest.mark.parametrize("shape", [(2, 8, 3, 3), (1, 16, 4, 4), (3, 17, 5, 9), (2, 40, 1, 33), (2, 64, 16, 16)])
def test_copies_from_one_order_of_axes_to_another(shape: tuple[int, ...], dtype: str) -> None:
    x = (50 * normal(*shape)).astype(dtype)
    (order,), (last,) = dense(x), as_images(x)
    parted = Window(last.type, (3 * last.strides[0], *last.strides[1:]))
    for source, target in ((order, last), (last, order), (order, parted), (parted, order)):
        check_copy(x, source, target)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "uint8", "bool", "int64"])
@pytest.mark.parametrize(
    "shape", [(2, 2, 3, 3), (1, 3, 7, 16), (3, 3, 16, 16), (2, 4, 5, 9), (1, 3, 2, 4), (5, 2, 1, 33)]
)
def test_images_of_few_channels_come_to_lie_with_their_channels_last(shape: tuple[int, ...], dtype: str) -> None:
    x = (50 * normal(*shape)).astype(as_dtype(dtype).numpy)
    (order,), (last,) = dense(x), as_images(x)
    check_copy(x, order, last)
    rows = Window(order.type, (2 * order.strides[0], *order.strides[1:]))
    check_copy(x, rows, last)


def test_copies_by_several_threads() -> None:
    for x in (normal(300, 410), normal(3, 50_001)):
        for threads in (1, 3):
            check_copy(x, *dense(x), Window(type_of(x), (4, 4 * len(x))), threads)
