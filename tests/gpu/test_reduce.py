"""Reductions of tensors however they lie."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.reduce import Reduce
from foreplan.runtime.cuda.kernels.reduce import reduce
from foreplan.runtime.kernel import Refused
from tests.gpu.check import DEVICE, check, made, run, type_of
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("how", ["sum", "max"])
def test_images_that_lie_with_their_channels_last(how: str) -> None:
    x = f32(3, 37, 9, 5)
    for axes in ((0, 2, 3), (1,), (2, 3)):
        check(Reduce(how, axes), x, windows=[channels_last(type_of(x))], atol=1e-5)
    repeated = Window(type_of(x), (0, 4, 0, 0))
    check(Reduce(how, (0, 2, 3)), np.broadcast_to(f32(37, 1, 1), x.shape), windows=[repeated], atol=1e-4)


def test_long_sums_are_taken_in_parts() -> None:
    for x, axes in ((f32(300_000), (0,)), (f32(20_000, 5), (0,)), (f32(3, 60_000), (1,))):
        kernel, _, _ = made(Reduce("mean", axes), [type_of(x)])
        assert len(kernel.instructions) == 2 and kernel.workspace > 0
        check(Reduce("sum", axes), x, rtol=1e-5, atol=1e-3)
        (mean,) = run(Reduce("mean", axes), [x])
        np.testing.assert_allclose(mean, x.astype(np.float64).mean(axes), atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3, 9, 70, 1100])
@pytest.mark.parametrize("width", [8, 12, 200])
def test_outputs_side_by_side(rows: int, width: int) -> None:
    x = f32(rows, 2, width)
    for axes in ((0,), (0, 1)):
        check(Reduce("sum", axes), x, atol=1e-4)
    for step in (width + 8, width + 1):
        apart = Window(type_of(x), (8 * step, 4 * step, 4))
        check(Reduce("max", (0, 1)), x, windows=[apart])
        check(Reduce("mean", (0,)), x, windows=[apart], atol=1e-4)
    check(Reduce("sum", (0, 1)), x.astype(DTYPES["bfloat16"].numpy), rtol=1e-2, atol=1e-2)


def test_outputs_that_begin_between_vectors() -> None:
    x, op = f32(500, 64), Reduce("sum", (0,))
    assert run(op, [x], behind=(1,))[0].tobytes() == run(op, [x])[0].tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint64", "int16"])
@pytest.mark.parametrize("how", ["sum", "prod", "max", "min"])
def test_elements_of_other_types(dtype: str, how: str) -> None:
    x = (RNG.standard_normal((6, 48)) * 3).astype(DTYPES[dtype].numpy)
    narrow = {"float16": 2e-3, "bfloat16": 1e-2}.get(dtype, 1e-5)
    for axes in ((0,), (1,)):
        check(Reduce(how, axes), x, rtol=narrow, atol=narrow)
    if dtype in ("float16", "bfloat16"):
        check(Reduce(how, (1,), wide=True), x, rtol=1e-5, atol=1e-5)


def test_nothing_to_reduce() -> None:
    check(Reduce("sum", (1,)), f32(3, 0))
    check(Reduce("sum", (0,)), f32(3, 0))
    check(Reduce("mean", (1,)), f32(3, 0))
    whole = Window.dense(TensorType(DTYPES["int32"], (3, 4)))
    with pytest.raises(Refused, match="mean"):
        reduce(Reduce("mean", (1,)), [whole], [Window.dense(TensorType(DTYPES["int32"], (3,)))], DEVICE)
