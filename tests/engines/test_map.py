"""Maps, masked maps and packed bits over tensors however they lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.graph import Window
from foreplan.graph.types import DTYPES
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.map import Map
from tests.engines.engine import ENGINES, Engine, require
from tests.kernels import NORMAL, UPDATE, as_images, dense, drawn_windows, layouts, normal, packed
from tests.ops.check import type_of
from tests.profile import pick

EXACT = {"rtol": 0.0, "atol": 0.0}
SIZES = [1, 3, 7, 8, 15, 16, 17, 31, 255, 256, 1000, 1023, 1024, 1025, 4097]
IMAGES = [(2, 24, 5, 7), (1, 1, 1, 1), (3, 5, 4, 1), (1, 16, 1, 1), (2, 3, 8, 8), (2, 130, 3, 3)]
BITS = [(8,), (24,), (1016,), (16, 5), (2, 24, 5, 7), (2, 3, 4, 2), (1, 12, 3, 2), (4, 8, 1, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_length(engine: Engine, size: int) -> None:
    engine.check(UPDATE, *normal(3, size), np.array(0.1, np.float32), **EXACT)
    engine.check(UPDATE, normal(3, size), normal(size), normal(3, 1), normal(1, 1), **EXACT)


def test_a_single_number_and_none(engine: Engine) -> None:
    engine.check(Map(("(a0 + a1)",)), normal(), normal(seed=1), **EXACT)
    engine.check(Map(("(a0 + a1)",)), normal(4, 0, 3), normal(3), **EXACT)
    engine.check(Map(("a0",)), normal(4, 0, 3))
    engine.check(PackBits("(a0 > 0)"), normal(0, 3))


@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_images_with_vectors_of_their_channels(engine: Engine, shape: tuple[int, ...]) -> None:
    given = [normal(*shape), *normal(3, shape[1], 1, 1)]
    engine.check_lying(NORMAL, *given, ways=layouts(*given), **EXACT)
    engine.check(NORMAL, *given, windows=as_images(*given), over=(0, 0), **EXACT)


def test_tensors_that_lie_differently(engine: Engine) -> None:
    (x, y), z = normal(2, 2, 19, 5, 6), normal(19, 1, 6)
    engine.check(Map(("((a0 + a1) * a2)",)), x, y, z, windows=[*as_images(x), *dense(y, z)], **EXACT)
    engine.check(Map(("a0",)), x, windows=as_images(x), **EXACT)
    given = [normal(2, 8, 3, 4), normal(1, 8, 1, 1)]
    engine.check(Map(("(a0 * a1)", "float64(a0)", "(a0 > a1)")), *given, windows=as_images(*given), **EXACT)


def test_views_with_gaps_and_backward(engine: Engine) -> None:
    x, row = normal(3, 5, 20), normal(20)
    engine.check(Map(("(a0 * 2)",)), x, windows=[Window(type_of(x), (-1000, 160, -4))], **EXACT)
    engine.check(Map(("(a0 * a1)",)), x, row, windows=[Window(type_of(x), (1200, 240, 8)), *dense(row)], **EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_of_any_type(engine: Engine, dtype: str) -> None:
    x, truth = (50 * normal(2, 6, 5, 7)).astype(DTYPES[dtype].numpy), normal(2, 6, 5, 7, seed=1) > 0
    engine.check(Map(("a0",)), x, windows=as_images(x), **EXACT)
    if not DTYPES[dtype].is_storage:
        engine.check(Map(("a0", "where((a0 > a0), a0, a0)")), x, windows=as_images(x), **EXACT)
        engine.check(Map(("where(a1, a0, a0)",)), x, truth, windows=[*as_images(x), *dense(truth)], **EXACT)


def test_narrow_elements_are_rounded_when_they_are_stored(engine: Engine) -> None:
    x, y, m = normal(3, 1000)
    op = Map(("bfloat16(((a0 * float32(a1)) + a2))", "float16(a0)"))
    engine.check(op, x, y.astype(DTYPES["bfloat16"].numpy), m, **EXACT)


def test_outputs_take_the_bytes_of_inputs(engine: Engine) -> None:
    given = [*normal(3, 1030), np.array(0.3, np.float32)]
    engine.check_over(UPDATE, given, (0, 0), (0, 1), (1, 2), (1, 0), **EXACT)


@pytest.mark.parametrize("shape", BITS, ids=str)
def test_a_masked_map_reads_the_bits_that_were_packed(engine: Engine, shape: tuple[int, ...]) -> None:
    (x, drawn), row = normal(2, *shape), normal(*shape[1:2], *(1 for _ in shape[2:]))
    truth, bits = drawn > 0, packed(drawn > 0)
    for windows in layouts(x):
        np.testing.assert_array_equal(engine.run(PackBits("(a0 > 0)"), [drawn], windows)[0], bits)
        taken = [*dense(bits), *windows]
        for over in (None, (0, 1)):
            (out,) = engine.run(MaskedMap(("where(a0, a1, 0.0)",)), [bits, x], taken, over)
            np.testing.assert_array_equal(out, np.where(truth, x, 0))
        if len(shape) > 1:
            op = MaskedMap(("where(a0, (a1 * a2), a2)", "(a1 + a2)"))
            chosen, added = engine.run(op, [bits, x, row], [*taken, *as_images(row)])
            np.testing.assert_array_equal(chosen, np.where(truth, x * row, row))
            np.testing.assert_array_equal(added, x + row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_is_above_nothing(engine: Engine, dtype: str) -> None:
    x = np.where(np.arange(64) % 3 == 0, np.nan, normal(64)).astype(DTYPES[dtype].numpy)
    wide = x.astype(np.float32)
    np.testing.assert_array_equal(engine.run(PackBits("(a0 > 0)"), [x])[0], packed(wide > 0))
    (out,) = engine.run(Map(("relu(float32(a0))",)), [x])
    np.testing.assert_array_equal(out, np.maximum(wide, 0))


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=pick(6, 12, 60), deadline=None)
@given(st.data())
def test_any_shapes_and_strides(name: str, data: st.DataObject) -> None:
    require(name)
    windows = drawn_windows(data)
    arrays = [normal(*window.shape, seed=i) for i, window in enumerate(windows)]
    ENGINES[name].check(Map(("((a0 - a1) * a2)", "(a0 < a2)")), *arrays, windows=windows, **EXACT)
