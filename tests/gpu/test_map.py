"""Maps, masked maps and packed bits over tensors however they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.map import Map
from foreplan.runtime.cuda.launch import Copy, Launch
from tests.gpu.check import check, made, run, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import NORMAL, UPDATE, as_images, drawn_windows, packed

pytestmark = needs_gcc
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [1, 3, 7, 8, 255, 256, 1023, 1024, 1025])
def test_rows_of_any_length(size: int) -> None:
    check(UPDATE, f32(size), f32(size), f32(size), np.float32(0.1).reshape(()), rtol=0, atol=0)
    check(UPDATE, f32(3, size), f32(size), f32(3, 1), f32(1, 1), rtol=0, atol=0)


def test_a_single_number_and_none() -> None:
    check(Map(("(a0 + a1)",)), f32(), f32(), rtol=0, atol=0)
    check(Map(("(a0 + a1)",)), f32(4, 0, 3), f32(3), rtol=0, atol=0)
    check(Map(("a0",)), f32(4, 0, 3))
    check(PackBits("(a0 > 0)"), f32(0, 3))


@pytest.mark.parametrize(
    "shape", [(2, 24, 5, 7), (1, 1, 1, 1), (3, 5, 4, 1), (1, 16, 1, 1), (2, 3, 8, 8), (2, 130, 3, 3)]
)
def test_images_with_vectors_of_their_channels(shape: tuple[int, ...]) -> None:
    given = [f32(*shape), *(f32(shape[1], 1, 1) for _ in range(3))]
    check(NORMAL, *given, windows=as_images(*given), rtol=0, atol=0)
    check(NORMAL, *given, rtol=0, atol=0)
    check(NORMAL, *given, windows=as_images(*given), over=(0, 0), rtol=0, atol=0)


def test_elements_move_sixteen_bytes_at_a_time_where_they_lie_side_by_side() -> None:
    def vector(*arrays: np.ndarray, windows: Sequence[Window] | None = None, text: str = "(a0 + a1)") -> object:
        kernel, _, _ = made(Map((text,)), [type_of(x) for x in arrays], windows)
        (only,) = kernel.instructions
        assert isinstance(only, Launch)
        return dict(only.source.defines)["VECTOR"]

    half = f32(64, 40).astype(np.float16)
    assert vector(f32(64, 40), f32(40)) == 4
    assert vector(half, half) == 8
    assert vector(half, f32(64, 40)) == 4
    assert vector(f32(64, 3), f32(3)) == 2
    x = f32(2, 24, 5, 7)
    row = f32(24, 1, 1)
    assert vector(x, row, windows=[*as_images(x), Window.dense(type_of(row))]) == 4
    narrow = half.reshape(2, 20, 8, 8)
    scaled = "float16((float32(a0) * a1))"  # a vector of their channels does not make images move by halves
    assert vector(narrow, f32(20, 1, 1), windows=as_images(narrow, f32(20, 1, 1)), text=scaled) == 8
    assert vector(half[0], f32(40), text=scaled) == 4


@pytest.mark.parametrize("behind", [(1, 0, 0), (0, 0, 1), (4, 0, 4), (3, 1, 5), (8, 2, 16)])
@pytest.mark.parametrize("shape", [(64,), (67,), (6, 24), (5, 17), (2, 24, 3, 3), (2, 9, 3, 3)])
def test_operands_that_begin_anywhere(shape: tuple[int, ...], behind: tuple[int, ...]) -> None:
    x = (f32(*shape) * 50).astype(DTYPES["bfloat16"].numpy)
    row = f32(*shape[1:2], *(1 for _ in shape[2:]))
    for windows in (as_images(x, row), None):
        check(Map(("bfloat16((float32(a0) * a1))",)), x, row, windows=windows, behind=behind, rtol=1e-2, atol=0)
    check(UPDATE, *(f32(*shape) for _ in range(3)), f32(), behind=(*behind, 0, 1, 2), rtol=0, atol=0)


def test_tensors_that_lie_differently() -> None:
    x, y, z = f32(2, 19, 5, 6), f32(2, 19, 5, 6), f32(19, 1, 6)
    windows = [channels_last(type_of(x)), Window.dense(type_of(y)), Window.dense(type_of(z))]
    check(Map(("((a0 + a1) * a2)",)), x, y, z, windows=windows, rtol=0, atol=0)


def test_views_with_gaps_and_backward() -> None:
    x = f32(3, 5, 20)
    check(Map(("(a0 * 2)",)), x, windows=[Window(type_of(x), (-1000, 160, -4))], rtol=0, atol=0)
    spread = Window(type_of(x), (1200, 240, 8))
    check(Map(("(a0 * a1)",)), x, f32(20), windows=[spread, Window.dense(type_of(f32(20)))], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_of_any_type(dtype: str) -> None:
    x = (RNG.standard_normal((2, 6, 5, 7)) * 50).astype(DTYPES[dtype].numpy)
    check(Map(("a0", "where((a0 > a0), a0, a0)")), x, windows=as_images(x), rtol=0, atol=0)
    check(Map(("where(a1, a0, a0)",)), x, f32(2, 6, 5, 7) > 0, windows=[*as_images(x), Window.dense(type_of(x > x))])


def test_narrow_elements_are_rounded_when_they_are_stored() -> None:
    x, y, m = f32(1000), f32(1000).astype(DTYPES["bfloat16"].numpy), f32(1000)
    check(Map(("bfloat16(((a0 * float32(a1)) + a2))", "float16(a0)")), x, y, m, rtol=0, atol=0)


def test_outputs_take_the_bytes_of_inputs() -> None:
    given = [f32(1030), f32(1030), f32(1030), np.float32(0.3).reshape(())]
    for over in ((0, 0), (0, 1), (1, 2), (1, 0)):
        check(UPDATE, *given, over=over, rtol=0, atol=0)


def test_what_is_broadcast_or_lies_otherwise_is_never_overwritten() -> None:
    x, row = f32(4, 6, 5, 5), f32(6, 1, 1)
    windows = [channels_last(type_of(x)), Window.dense(type_of(x)), Window.dense(type_of(row))]
    kernel, _, layouts = made(Map(("((a0 + a1) + a2)",)), [w.type for w in windows], windows)
    assert layouts == windows[:1] and kernel.overwrites == ((0, 0),)


@pytest.mark.parametrize("shape", [(8,), (24,), (1016,), (16, 5), (2, 24, 5, 7), (2, 3, 4, 2), (1, 12, 3, 2)])
def test_a_masked_map_reads_the_bits_that_were_packed(shape: tuple[int, ...]) -> None:
    x, truth, row = f32(*shape), f32(*shape) > 0, f32(*shape[1:2], *(1 for _ in shape[2:]))
    for windows in (as_images(x), [Window.dense(type_of(x))]):
        (bits,) = run(PackBits("(a0 > 0)"), [x], windows)
        np.testing.assert_array_equal(bits, packed(x > 0))
        mask = [packed(truth), x]
        taken = [Window.dense(type_of(mask[0])), *windows]
        for over in (None, (0, 1)):
            (out,) = run(MaskedMap(("where(a0, a1, 0.0)",)), mask, taken, over)
            np.testing.assert_array_equal(out, np.where(truth, x, 0))
        if len(shape) > 1:
            both = run(MaskedMap(("where(a0, (a1 * a2), a2)", "(a1 + a2)")), [*mask, row], [*taken, *as_images(row)])
            np.testing.assert_array_equal(both[0], np.where(truth, x * row, row))
            np.testing.assert_array_equal(both[1], x + row)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(80,), (5, 48), (3, 24, 3, 5), (1, 12, 3, 2), (1, 20, 2, 2), (2, 6, 2, 2), (2, 4, 1, 3, 3)]
)
def test_bits_that_a_vector_of_any_type_goes_with(shape: tuple[int, ...], dtype: str) -> None:
    x, truth = (f32(*shape) * 50).astype(DTYPES[dtype].numpy), f32(*shape) > 0
    for windows in (as_images(x), [Window.dense(type_of(x))]):
        for behind in ((), (1,), (3, 1), (0, 0, 1)):
            given = [Window.dense(type_of(packed(truth))), *windows]
            (out,) = run(MaskedMap(("where(a0, a1, a1 - a1)",)), [packed(truth), x], given, behind=behind)
            np.testing.assert_array_equal(out, np.where(truth, x, 0))


def test_bits_of_narrow_elements_and_of_numbers_that_are_none() -> None:
    x = np.where(np.arange(64) % 3 == 0, np.nan, f32(64)).astype(DTYPES["bfloat16"].numpy)
    (bits,) = run(PackBits("(a0 > 0)"), [x])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(bits, packed(x > 0))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", [(2, 8, 3, 3), (1, 16, 4, 4), (3, 37, 5, 9), (2, 40, 1, 33)])
def test_copies_from_one_order_of_axes_to_another(shape: tuple[int, ...], dtype: str) -> None:
    x = (RNG.standard_normal(shape) * 50).astype(DTYPES[dtype].numpy)
    last = channels_last(type_of(x))
    parted = Window(last.type, tuple(3 * step for step in last.strides[:1]) + last.strides[1:])
    for windows in ([last], [parted], [Window.dense(last.type)]):
        kernel, _, layouts = made(Map(("a0",)), [last.type], windows)
        (only,) = kernel.instructions
        assert isinstance(only, Copy) == (layouts == windows)
        check(Map(("a0",)), x, windows=windows, rtol=0, atol=0)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shapes_and_strides(data: st.DataObject) -> None:
    windows = drawn_windows(data)
    arrays = [f32(*window.shape) for window in windows]
    check(Map(("((a0 - a1) * a2)", "(a0 < a2)")), *arrays, windows=windows, rtol=0, atol=0)
