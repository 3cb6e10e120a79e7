"""Statistics of channels and the gradient of batch normalisation."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.norm.batch import BatchNormGrad, ChannelMoments
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from tests.gpu.check import check, made, run, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import as_images, assert_near, dense, expected, layouts, normal, packed

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]


def test_moments_of_many_positions_far_from_zero() -> None:
    x = (normal(2, 3, 200, 150) + np.float32(1000)).astype(np.float32)
    x[0, 1, 0, 0] = 5000
    kernel, _, _ = made(ChannelMoments(), [type_of(x)])
    assert kernel.workspace > 2 * 4 * 3
    mean, variance = run(ChannelMoments(), [x], as_images(x))
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(variance, exact.var((0, 2, 3)), rtol=1e-4)


@pytest.mark.parametrize("shape", [(3, 64, 33, 31), (9, 8, 1, 1), (2, 300, 6, 6), (5, 3, 40, 1), (2, 16, 90, 90)])
def test_moments_of_parts_that_lie_far_apart(shape: tuple[int, ...]) -> None:
    """Images whose own means differ: what parts have is put together without loss."""
    x = normal(*shape) + np.arange(100, 100 * (shape[0] + 1), 100, np.float32).reshape(-1, 1, 1, 1)
    exact, axes = x.astype(np.float64), (0, 2, 3)
    for windows in layouts(x):
        for behind in (0, 1):
            mean, variance = run(ChannelMoments(), [x], windows, behind=(behind,))
            np.testing.assert_allclose(mean, exact.mean(axes), rtol=1e-6)
            np.testing.assert_allclose(variance, exact.var(axes), rtol=1e-5)


def gradient_case(shape: tuple[int, ...]) -> list[np.ndarray]:
    (x, g), scale = normal(2, *shape), normal(shape[1])
    others = (0, *range(2, len(shape)))
    return [x, scale, x.mean(others), x.var(others) + np.float32(0.1), g]


@pytest.mark.parametrize(("dtype", "narrow"), [("bfloat16", "100"), ("float16", "011"), ("bfloat16", "111")])
def test_scales_and_statistics_may_be_as_narrow_as_images(dtype: str, narrow: str) -> None:
    """The scale, the mean and the variance, each of its own type."""
    x, *vectors, g = gradient_case((2, 33, 4, 3))
    type = DTYPES[dtype].numpy
    given = [v.astype(type) if is_narrow == "1" else v for v, is_narrow in zip(vectors, narrow)]
    images = [x.astype(type), g.astype(type)]
    wide = [v.astype(np.float32) for v in (images[0], *given, images[1])]
    found, wanted = run(BatchNormGrad(1e-5), [images[0], *given, images[1]]), expected(BatchNormGrad(1e-5), wide)
    assert_near([y.astype(np.float32) for y in found], wanted, 2e-2, 2e-2)


MASKS = [(2, 8, 4, 3), (7, 40, 1, 1), (3, 64, 9, 7), (2, 5, 4, 7), (6, 40), (2, 3, 4, 5, 2), (1, 37, 40, 2)]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("shape", MASKS)
def test_the_gradient_of_what_a_mask_lets_through(shape: tuple[int, ...], keeps: bool) -> None:
    """Of a residual block's two gradients: their sum where a ReLU was open, to the bit where it is kept."""
    x, scale, mean, variance, g = gradient_case(shape)
    more, truth = normal(*shape, seed=1), normal(*shape, seed=2) > 0.3
    op = MaskedBatchNormGrad(1e-5, "where(a0, (a1 + a2), 0.0)", keeps)
    masked = np.where(truth, g + more, 0)
    wanted = [*expected(BatchNormGrad(1e-5), [x, scale, mean, variance, masked]), *[masked] * keeps]
    given = [x, scale, mean, variance, packed(truth), g, more]
    for windows in layouts(*given):
        kernel, _, _ = made(op, [type_of(each) for each in given], windows)
        assert kernel.overwrites == ((0, 0), *((o, i) for i in (5, 6) for o in ((0, 3) if keeps else (0,))))
        for over in (None, *kernel.overwrites):
            found = run(op, given, windows, over)
            assert_near(found, wanted, 1e-4, 1e-5)
            assert not keeps or found[3].tobytes() == masked.tobytes()


@pytest.mark.parametrize("shape", [(2, 16, 9, 7), (3, 11, 8, 5), (2, 40, 30, 30)])
def test_images_that_begin_anywhere(shape: tuple[int, ...]) -> None:
    """As images that begin at aligned places: to the bit, but for what a compiler contracts in one path alone."""
    x, scale, mean, variance, g = gradient_case(shape)
    given = [x, scale, mean, variance, packed(normal(*x.shape, seed=1) > 0), g]
    narrow = [each.astype(DTYPES["bfloat16"].numpy) if each.ndim == 4 else each for each in given]
    for keeps in (False, True):
        for arrays, op in (
            (given, MaskedBatchNormGrad(1e-5, "where(a0, a1, 0.0)", keeps)),
            (narrow, MaskedBatchNormGrad(1e-5, "bfloat16(where(a0, float32(a1), 0.0))", keeps)),
        ):
            windows = layouts(*arrays)[0]
            whole = run(op, arrays, windows)
            for behind in ((1,), (0, 0, 0, 0, 1, 3), (0, 0, 0, 0, 0, 0, 5, 0, 0, 1)):
                assert_near(run(op, arrays, windows, behind=behind), whole, 1e-5 if arrays is given else 2.0**-7, 1e-5)


def test_narrow_gradients_are_rounded_before_they_are_summed() -> None:
    """As if a masked map had made them: results are those of the two kernels, to the bit."""
    x, scale, mean, variance, g = gradient_case((2, 24, 5, 7))
    truth, more = normal(*x.shape, seed=1) > 0, normal(*x.shape, seed=2)
    x, g, more = (each.astype(DTYPES["bfloat16"].numpy) for each in (x, g, more))
    expr = "bfloat16(where(a0, (float32(a1) + float32(a2)), 0.0))"
    (images,), bits, vectors = as_images(x), packed(truth), dense(scale) * 3
    masked = np.where(truth, (g.astype(np.float32) + more).astype(g.dtype), g.dtype.type(0))
    wanted = run(BatchNormGrad(1e-5), [x, scale, mean, variance, masked], [images, *vectors, images])
    for keeps in (False, True):
        op = MaskedBatchNormGrad(1e-5, expr, keeps)
        windows = [images, *vectors, *dense(bits), images, images]
        found = run(op, [x, scale, mean, variance, bits, g, more], windows)
        for ours, theirs in zip(found, [*wanted, masked]):
            assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("shape", [(2, 3, 50), (2, 3, 4, 5, 2)])
def test_other_numbers_of_axes(shape: tuple[int, ...]) -> None:
    given = gradient_case(shape)
    for windows in layouts(*given):
        check(ChannelMoments(), given[0], windows=windows[:1])
        check(BatchNormGrad(1e-5), *given, windows=windows, rtol=1e-4, atol=1e-5)
