"""Compiled loops on bfloat16: what NumPy kernels give in float32 on the same numbers, rounded where it is written."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.index import Gather
from foreplan.ops.join import Concat, Pad
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.map import Map
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, ChannelMoments
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.reduce import Reduce
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, RowOp, Softmax, SoftmaxGrad
from foreplan.runtime.cpu.codegen.elements import as_in, number
from tests.cpu.check import needs_onednn, run, type_of
from tests.cpu.narrow import BF16, check_narrow, narrow, widened
from tests.engines import test_batch_norm, test_pool, test_row_norm, test_softmax
from tests.kernels import as_images

pytestmark = needs_onednn()


def numbers(shape: tuple[int, ...], seed: int, offset: float = 0.0) -> np.ndarray:
    return narrow(np.random.default_rng(seed).standard_normal(shape) + offset)


def positive(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 2, shape).astype(np.float32)


def test_elements_are_rounded_to_the_nearest_and_nan_stays() -> None:
    """Every bfloat16, what lies half-way to the next and a little beside that, against ml_dtypes."""
    import numba

    @numba.njit
    def there_and_back(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
        for k in range(len(x)):
            y[k] = as_in(y, x[k])
            z[k] = number(y[k])

    high = np.arange(2**16, dtype=np.uint32) << 16
    x = np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)
    y, z = np.zeros(x.size, np.uint16), np.zeros(x.size, np.float32)
    there_and_back(x, y, z)
    with np.errstate(invalid="ignore"):
        wanted = x.astype(BF16)
    numeric = ~np.isnan(x)
    np.testing.assert_array_equal(y[numeric], wanted.view(np.uint16)[numeric])
    np.testing.assert_array_equal(z, wanted.astype(np.float32))
    assert np.isnan(z[~numeric]).all()


@pytest.mark.parametrize("shape", [(7,), (3, 40), (2, 19, 5, 3)], ids=str)
def test_maps_of_several_types(shape: tuple[int, ...]) -> None:
    x, y = numbers(shape, 1), positive(shape, 2)
    x.reshape(-1)[:3] = np.nan, np.inf, -np.inf
    op = Map(("bfloat16(relu(float32(a0)) * a1)", "float32(a0) + a1", "bfloat16(exp(float32(a0)))"))
    check_narrow(op, x, y)
    check_narrow(op, x, y, windows=as_images(x, y))
    check_narrow(Map(("bfloat16(float32(a0) * 3)",)), x, over=(0, 0))
    eights = numbers((*shape, 8), 3)
    check_narrow(PackBits("a0 > 0"), eights)


def test_copies_masks_and_slices() -> None:
    image, x = numbers((2, 24, 5, 8), 1), numbers((7, 24), 2)
    check_narrow(Map(("a0",)), image, windows=as_images(image), ulps=0.0)
    (bits,) = run(PackBits("a0 > 0"), [numbers((7, 24), 3)])
    for over in (None, (0, 1)):
        check_narrow(MaskedMap(("where(a0, a1, 0.0)",)), bits, x, over=over, ulps=0.0)
    check_narrow(Gather(0), numbers((7, 5), 3), np.array([6, 0, 0, 3]), ulps=0.0)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_reductions(axes: tuple[int, ...], how: str, wide: bool) -> None:
    for shape in ((3, 5, 7), (2, 33, 64), (1, 4, 1), (2, 3, 1030)):
        check_narrow(Reduce(how, axes, wide=wide), numbers(shape, 3))


@pytest.mark.parametrize("shape", test_batch_norm.SHAPES, ids=str)
def test_batch_normalisation(shape: tuple[int, ...]) -> None:
    x, g, vectors = numbers(shape, 5, 1.0), numbers(shape, 6), [positive(shape[1:2], 7 + i) for i in range(4)]
    check_narrow(ChannelMoments(), x, windows=as_images(x))
    given = [x, *vectors]
    for over in (None, (0, 0)):
        check_narrow(BatchNorm(1e-3), *given, windows=as_images(*given), over=over)
    given = [x, *vectors[:3], g]
    for over in (None, (0, 0), (0, 4)):
        check_narrow(BatchNormGrad(1e-3), *given, windows=as_images(*given), over=over, exact=1e-4)


@pytest.mark.parametrize(("shape", "axis"), test_row_norm.CASES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_layer_normalisation(shape: tuple[int, ...], axis: int, scaled: bool, centred: bool) -> None:
    x, g, scale = numbers(shape, 1, 2.0), numbers(shape, 2), [positive(shape[axis:], 3)] * scaled
    op = (LayerNorm if centred else RMSNorm)(axis, 1e-3)
    gradient = (LayerNormGrad if centred else RMSNormGrad)(axis, scaled)
    bias = [positive(shape[axis:], 4)] * (scaled and centred)
    check_narrow(op, x, *scale, *bias)
    check_narrow(op, x, *scale, *bias, over=(0, 0))
    statistics = [y.astype(np.float32) for y in run(op, [widened(x)])[1:]]
    given = [x, *scale, *statistics, g]
    for over in (None, (0, 0), (0, len(given) - 1)):
        check_narrow(gradient, *given, over=over, exact=1e-4)
    for over in (None, (0, len(given) - 1), (0, len(given))):
        check_narrow(gradient, *given, numbers(shape, 5), over=over, exact=1e-4)


@pytest.mark.parametrize(("shape", "axis"), test_softmax.CASES)
@pytest.mark.parametrize(("of", "gradient"), [(Softmax, SoftmaxGrad), (LogSoftmax, LogSoftmaxGrad)])
def test_softmax_and_its_gradient(of: type[RowOp], gradient: type[RowOp], shape: tuple[int, ...], axis: int) -> None:
    x, g = numbers(shape, 1), numbers(shape, 2)
    windows = as_images(x, g) if axis == 1 else None
    check_narrow(of(axis), x, windows=windows and windows[:1])
    check_narrow(of(axis), x, windows=windows and windows[:1], over=(0, 0))
    (y,) = run(of(axis), [x])
    for over in (None, (0, 0), (0, 1)):
        check_narrow(gradient(axis), y, g, windows=windows, over=over, exact=1e-4)


def test_rows_with_numbers_that_are_not_finite() -> None:
    x = numbers((5, 40), 4)
    x[0, 3], x[1, 39], x[2], x[3, 7] = np.nan, np.inf, -np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        for op in (Softmax(1), LogSoftmax(1)):
            check_narrow(op, x)


@pytest.mark.parametrize(("shape", "axis"), test_softmax.CASES)
def test_cross_entropy_and_its_gradient(shape: tuple[int, ...], axis: int) -> None:
    x, target = numbers(shape, 5), test_softmax.targets(shape, axis)
    target.reshape(-1)[:1] = -100
    given: list[np.ndarray] = [x, target]
    windows = [channels_last(type_of(x)) if axis == 1 else Window.dense(type_of(x)), Window.dense(type_of(target))]
    check_narrow(CrossEntropy(axis), *given, windows=windows)
    _, lse = run(CrossEntropy(axis), given, windows)
    given += [lse.astype(np.float32), positive(target.shape, 6)]
    windows += [Window.dense(type_of(array)) for array in given[2:]]
    for over in (None, (0, 0)):
        check_narrow(CrossEntropyGrad(axis), *given, windows=windows, over=over)


@pytest.mark.parametrize("case", test_pool.CASES)
def test_pooling(case: str) -> None:
    """Sums are taken in float32: what several windows give is rounded once."""
    (shape, *geometry), given = test_pool.CASES[case], test_pool.pooled(case)
    x, g, index = numbers(shape, 1), numbers(given, 2), np.random.default_rng(3).integers(0, 9, given).astype(np.uint8)
    for ops in (
        (MaxPool(*geometry), x),
        (MaxPool(*geometry, True), x),
        (MaxPoolGrad(*geometry, shape=shape), index, g),
        (AvgPool(*geometry), x),
        (AvgPoolGrad(*geometry, shape=shape), g),
    ):
        op, *arrays = ops
        check_narrow(op, *arrays)
        check_narrow(op, *arrays, windows=as_images(*arrays))
        check_narrow(op, *arrays, windows=[test_pool.wider(array) for array in arrays])


def test_the_largest_with_nan_is_nan() -> None:
    x = numbers((1, 20, 6, 6), 1)
    x[0, 3, 2, 2], x[0, 4] = np.nan, -np.inf
    check_narrow(MaxPool((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)), x)


def test_joined_and_padded() -> None:
    x, y = numbers((2, 3, 4), 1), numbers((2, 5, 4), 2)
    check_narrow(Concat(1), x, y)
    check_narrow(Pad(((0, 0), (1, 2), (0, 0)), 1.5), x)
