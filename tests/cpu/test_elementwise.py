"""Maps, masked maps and packed bits over tensors however they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.map import Map
from foreplan.runtime.cpu.codegen.transpose import Transposition
from foreplan.runtime.cpu.table import family_of
from foreplan.runtime.cpu.threads import set_threads
from tests.cpu.check import check, kernel_for, laid_out, needs_onednn, run, type_of
from tests.kernels import NORMAL, UPDATE, as_images, drawn_windows, packed

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [1, 7, 8, 15, 16, 17, 31, 1000, 1024, 1025, 4097])
def test_rows_of_any_length(size: int) -> None:
    check(UPDATE, f32(size), f32(size), f32(size), np.float32(0.1).reshape(()), rtol=0, atol=0)
    check(UPDATE, f32(3, size), f32(size), f32(3, 1), f32(1, 1), rtol=0, atol=0)


def test_a_single_number_and_none() -> None:
    check(Map(("(a0 + a1)",)), f32(), f32(), rtol=0, atol=0)
    check(Map(("(a0 + a1)",)), f32(4, 0, 3), f32(3), rtol=0, atol=0)


@pytest.mark.parametrize(
    "shape", [(2, 24, 5, 7), (1, 1, 1, 1), (3, 5, 4, 1), (1, 16, 1, 1), (2, 3, 8, 8), (2, 130, 3, 3)]
)
def test_images_with_vectors_of_their_channels(shape: tuple[int, ...]) -> None:
    given = [f32(*shape), *(f32(shape[1], 1, 1) for _ in range(3))]
    check(NORMAL, *given, windows=as_images(*given), rtol=0, atol=0)
    check(NORMAL, *given, rtol=0, atol=0)
    check(NORMAL, *given, windows=as_images(*given), over=(0, 0), rtol=0, atol=0)


def test_outputs_lie_as_the_whole_inputs_do() -> None:
    x, y = f32(2, 8, 3, 4), f32(2, 8, 3, 4)
    types = [type_of(x), type_of(y)]
    for op, outputs in ((Map(("(a0 + a1)",)), 1), (Map(("(a0 < a1)", "float64(a0)")), 2)):
        results = op.infer(types)
        family = family_of(op, types, results, 1)
        assert family is not None
        last = [channels_last(result) for result in results]
        assert family.layout(op, as_images(x, y), results) == last
        assert family.layout(op, [Window.dense(types[0]), *as_images(y)], results) == last
        assert family.layout(op, [Window.dense(type) for type in types], results) == [Window.dense(t) for t in results]
        assert len(last) == outputs
    given = [x, f32(1, 8, 1, 1)]
    check(Map(("(a0 * a1)", "float64(a0)", "(a0 > a1)")), *given, windows=as_images(*given), rtol=0, atol=0)


def test_tensors_that_lie_differently() -> None:
    x, y, z = f32(2, 19, 5, 6), f32(2, 19, 5, 6), f32(19, 1, 6)
    windows = [channels_last(type_of(x)), Window.dense(type_of(y)), Window.dense(type_of(z))]
    check(Map(("((a0 + a1) * a2)",)), x, y, z, windows=windows, rtol=0, atol=0)
    check(Map(("a0",)), x, windows=as_images(x), rtol=0, atol=0)


def test_views_with_gaps_and_backward() -> None:
    x = f32(3, 5, 20)
    backward = Window(type_of(x), (-1000, 160, -4))
    raw = np.zeros(20_000, np.uint8)
    kernel = kernel_for(Map(("(a0 * 2)",)), [backward], [Window.dense(type_of(x))], 1)
    assert kernel is not None
    source = np.ndarray(x.shape, np.float32, raw, 9_996, backward.strides)
    source[...] = x
    out = np.empty_like(x)
    kernel.bind([source], [out], np.zeros(0, np.uint8))()
    np.testing.assert_array_equal(out, x * 2)
    spread = Window(type_of(x), (1200, 240, 8))
    check(Map(("(a0 * a1)",)), x, f32(20), windows=[spread, Window.dense(type_of(f32(20)))], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int64", "bool"])
def test_strided_elements_of_any_type(dtype: str) -> None:
    x = (RNG.standard_normal((2, 6, 5, 7)) * 50).astype(dtype)
    check(Map(("a0", "where((a0 > a0), a0, a0)")), x, windows=as_images(x), rtol=0, atol=0)
    check(Map(("where(a1, a0, a0)",)), x, f32(2, 6, 5, 7) > 0, windows=[*as_images(x), Window.dense(type_of(x > x))])


def test_outputs_take_the_bytes_of_inputs() -> None:
    given = [f32(1030), f32(1030), f32(1030), np.float32(0.3).reshape(())]
    for over in ((0, 0), (0, 1), (1, 2), (1, 0)):
        check(UPDATE, *given, over=over, rtol=0, atol=0)
    x, y = f32(64, 33), f32(64, 33)
    swap = Map(("a1", "a0"))
    kernel = kernel_for(swap, [Window.dense(type_of(x))] * 2, [Window.dense(type_of(x))] * 2, 1)
    assert kernel is not None and set(kernel.overwrites) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    a, b = x.copy(), y.copy()
    kernel.bind([a, b], [a, b], np.zeros(0, np.uint8))()
    np.testing.assert_array_equal(a, y)
    np.testing.assert_array_equal(b, x)


def test_what_is_broadcast_or_lies_otherwise_is_never_overwritten() -> None:
    x, row = f32(4, 6, 5, 5), f32(6, 1, 1)
    windows = [channels_last(type_of(x)), Window.dense(type_of(x)), Window.dense(type_of(row))]
    kernel = kernel_for(Map(("((a0 + a1) + a2)",)), windows, [channels_last(type_of(x))], 1)
    assert kernel is not None and kernel.overwrites == ((0, 0),)


@pytest.mark.parametrize(
    "shape", [(8,), (24,), (1016,), (16, 5), (2, 24, 5, 7), (2, 3, 4, 2), (1, 12, 3, 2), (4, 8, 1, 1)]
)
def test_bits_are_packed_in_the_order_of_memory(shape: tuple[int, ...]) -> None:
    x = f32(*shape)
    for windows in (as_images(x), [Window.dense(type_of(x))]):
        (bits,) = run(PackBits("(a0 > 0)"), [x], windows)
        np.testing.assert_array_equal(bits, packed(x > 0))


@pytest.mark.parametrize(
    "shape", [(8,), (24,), (1016,), (16, 5), (2, 24, 5, 7), (2, 3, 4, 2), (1, 12, 3, 2), (4, 8, 1, 1)]
)
def test_a_masked_map_reads_the_bits_that_were_packed(shape: tuple[int, ...]) -> None:
    x, truth, row = f32(*shape), f32(*shape) > 0, f32(*shape[1:2], *(1 for _ in shape[2:]))
    for windows in (as_images(x), [Window.dense(type_of(x))]):
        mask = [packed(truth), x]
        taken = [Window.dense(type_of(mask[0])), *windows]
        (out,) = run(MaskedMap(("where(a0, a1, 0.0)",)), mask, taken)
        np.testing.assert_array_equal(out, np.where(truth, x, 0))
        (out,) = run(MaskedMap(("where(a0, a1, 0.0)",)), mask, taken, over=(0, 1))
        np.testing.assert_array_equal(out, np.where(truth, x, 0))
        if len(shape) > 1:
            both = run(MaskedMap(("where(a0, (a1 * a2), a2)", "(a1 + a2)")), [*mask, row], [*taken, *as_images(row)])
            np.testing.assert_array_equal(both[0], np.where(truth, x * row, row))
            np.testing.assert_array_equal(both[1], x + row)


def test_nan_is_above_nothing() -> None:
    x = np.where(np.arange(64) % 3 == 0, np.nan, f32(64)).astype(np.float32)
    (bits,) = run(PackBits("(a0 > 0)"), [x])
    np.testing.assert_array_equal(bits, packed(x > 0))
    (out,) = run(Map(("relu(a0)",)), [x])
    np.testing.assert_array_equal(out, np.maximum(x, 0))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "bool", "int64"])
@pytest.mark.parametrize("shape", [(2, 8, 3, 3), (1, 16, 4, 4), (3, 17, 5, 9), (2, 40, 1, 33), (2, 64, 16, 16)])
def test_copies_from_one_order_of_axes_to_another(shape: tuple[int, ...], dtype: str) -> None:
    x = (RNG.standard_normal(shape) * 50).astype(dtype)
    dense, last = Window.dense(type_of(x)), channels_last(type_of(x))
    parted = Window(last.type, tuple(3 * step for step in last.strides[:1]) + last.strides[1:])
    for source, target in ((dense, last), (last, dense), (dense, parted), (parted, dense)):
        kernel = kernel_for(Map(("a0",)), [source], [target], 1)
        assert isinstance(kernel, Transposition) and kernel.overwrites == ()
        out = laid_out(np.zeros_like(x), target)
        kernel.bind([laid_out(x, source)], [out], np.zeros(0, np.uint8))()
        np.testing.assert_array_equal(out, x)


def bound_bits(op: Map, given: Sequence[np.ndarray], threads: int) -> bytes:
    types = [type_of(x) for x in given]
    windows = as_images(*given)
    family = family_of(op, types, op.infer(types), threads)
    assert family is not None
    layout = family.layout(op, windows, op.infer(types))
    kernel = kernel_for(op, windows, layout, threads)
    assert kernel is not None
    outputs = [laid_out(np.zeros(w.shape, w.type.dtype.numpy), w) for w in layout]
    kernel.bind([laid_out(x, w) for x, w in zip(given, windows)], outputs, np.zeros(0, np.uint8))()
    return b"".join(y.tobytes() for y in outputs)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    turned = Window(type_of(f32(300, 410)), (4, 1200))
    try:
        x = f32(300, 410)
        for threads in (1, 3):
            kernel = kernel_for(Map(("a0",)), [turned], [Window.dense(turned.type)], threads)
            assert isinstance(kernel, Transposition)
            copy = np.zeros_like(x)
            kernel.bind([laid_out(x, turned)], [copy], np.zeros(0, np.uint8))()
            np.testing.assert_array_equal(copy, x)
        for given in ([f32(123_457)] * 4, [f32(2, 37, 61, 59), *(f32(37, 1, 1) for _ in range(3))]):
            op = Map(("tanh((((a0 - a1) * a2) + a3))",))
            assert bound_bits(op, given, 1) == bound_bits(op, given, 3)
    finally:
        set_threads(1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shapes_and_strides(data: st.DataObject) -> None:
    windows = drawn_windows(data)
    arrays = [f32(*window.shape) for window in windows]
    check(Map(("((a0 - a1) * a2)", "(a0 < a2)")), *arrays, windows=windows, rtol=0, atol=0)
