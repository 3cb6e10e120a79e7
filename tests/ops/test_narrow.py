"""Ops on bfloat16: float32 inside and one rounding.

A result may err by half a unit in its last place, 2^-8 of its size, and by what float32 sums may, beside results of the
same op in float64; some are compared with JAX as well.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import Op, TensorType, as_dtype
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.conv.mapped import ConvMap
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.matmul import MatMul
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, BatchNormTrain, ChannelMoments
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from foreplan.ops.norm.sync import ChannelSums
from foreplan.ops.pool import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from foreplan.ops.reduce import Reduce
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from tests.ops.check import decomposed, run_op
from tests.oracle.peers import jax, jnp, lax

BF16 = np.dtype(ml_dtypes.bfloat16)
HALF_UNIT = 2.0**-8  # of bfloat16, beside a number's size
SUMS = 2.0**-16  # what float32 sums of some hundred terms may err by, beside the largest result
RNG = np.random.default_rng(0)


def wide(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def narrow(*shape: int) -> np.ndarray:
    return wide(*shape).astype(BF16)


def positive(n: int) -> np.ndarray:
    return np.abs(wide(n)) + 0.5


def check(op: Op, *inputs: np.ndarray, types: str, sums: float = SUMS) -> list[np.ndarray]:
    """Assert what the outputs are: their types, as letters h and f, and their contents; return them."""
    exact = run_op(op, *(x.astype(np.float64) if as_dtype(x.dtype).is_float else x for x in inputs))
    made = run_op(op, *inputs)
    assert "".join({"bfloat16": "h", "float32": "f"}.get(y.dtype.name, "i") for y in made) == types
    for got, wanted in zip(made, exact, strict=True):
        rounding = HALF_UNIT if got.dtype == BF16 else 0.0
        slack = sums * float(np.abs(wanted).max(initial=0.0))
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=rounding, atol=slack)
    return made


GEOMETRIES = [  # channels, outputs, groups, taps, stride, pad
    (4, 6, 1, 3, 1, 1),
    (4, 6, 2, 3, 2, 1),
    (8, 8, 8, 3, 1, 1),
    (8, 8, 8, 3, 2, 1),
    (5, 7, 1, 1, 1, 0),
    (3, 4, 1, 2, 2, 0),
]


@pytest.mark.parametrize("case", GEOMETRIES, ids=str)
def test_convolution_and_its_gradients(case: tuple[int, ...]) -> None:
    channels, outputs, groups, taps, stride, pad = case
    geometry = ((stride,) * 2, ((pad, pad),) * 2, (1, 1), groups)
    x, w = narrow(3, channels, 9, 8), narrow(outputs, channels // groups, taps, taps)
    (y,) = check(Conv(*geometry), x, w, types="h")
    g = narrow(*y.shape)
    for added in (wide(outputs), narrow(outputs), g):
        check(Conv(*geometry), x, w, added, types="h")
    data = ConvDataGrad(*geometry, spatial=(9, 8))
    check(data, g, w, types="h")
    check(data, g, w, x, types="h")
    weights = ConvWeightGrad(*geometry, kernel=(taps, taps))
    check(weights, x, g, types="h")
    check(weights, x, g, w, types="h")
    weights = ConvWeightGrad(*geometry, kernel=(taps, taps), wide=True)
    check(weights, x, g, types="f")
    check(weights, x, g, wide(*w.shape), types="f")


def test_a_wide_weight_gradient_of_targets_that_have_narrow_ones_alone() -> None:
    op = ConvWeightGrad((1, 1), ((1, 1),) * 2, (1, 1), kernel=(3, 3), wide=True)
    x, g, base = narrow(2, 4, 6, 5), narrow(2, 3, 6, 5), wide(3, 4, 3, 3)
    (sums,) = run_op(op, x, g)
    for found, wanted in ((decomposed(op, x, g), sums), (decomposed(op, x, g, base), sums + base)):
        assert found[0].dtype == np.float32
        assert (np.abs(found[0] - wanted) <= HALF_UNIT * np.abs(sums) + 1e-5).all()


def test_convolution_of_images_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreplan.ops.conv.kernels.COLUMN_BYTES", 1 << 12)
    monkeypatch.setattr("foreplan.ops.conv.narrow.IMAGE_BYTES", 1 << 10)
    from foreplan.ops.conv.kernels import blocking

    blocking.cache_clear()
    try:
        test_convolution_and_its_gradients((4, 6, 2, 3, 2, 1))
        test_convolution_and_its_gradients((8, 8, 8, 3, 1, 1))
    finally:
        blocking.cache_clear()


def test_convolution_is_jaxs() -> None:
    x, w, bias = narrow(2, 3, 8, 7), narrow(5, 3, 3, 3), wide(5)
    expected = lax.conv_general_dilated(
        jnp.asarray(x.astype(np.float32)),
        jnp.asarray(w.astype(np.float32)),
        (2, 2),
        [(1, 1)] * 2,
        precision="highest",
    )
    (found,) = run_op(Conv((2, 2), ((1, 1),) * 2, (1, 1)), x, w, bias)
    np.testing.assert_allclose(found.astype(np.float32), expected + bias[:, None, None], HALF_UNIT, 1e-5)


def test_convolution_with_maps() -> None:
    op = ConvMap((1, 1), ((1, 1),) * 2, (1, 1), 1, "relu((((a0 - a1) * a2) + a3))", biased=True)
    x, w, bias, vector, image = narrow(2, 3, 6, 5), narrow(4, 3, 3, 3), wide(4), wide(4, 1, 1), narrow(2, 4, 6, 5)
    check(op, x, w, bias, vector, vector[None], image, types="h")
    with pytest.raises(ShapeError):
        op.infer([TensorType(as_dtype(a.dtype), a.shape) for a in (x, w, bias, vector, vector, wide(2, 4, 6, 5))])


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (300, 520, 20), (1, 1100, 1), (4, 0, 3)])
def test_products(sizes: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    m, k, n = sizes
    a = narrow(k, m) if transposed[0] else narrow(m, k)
    b = narrow(n, k) if transposed[1] else narrow(k, n)
    check(MatMul(*transposed), a, b, types="h")
    check(MatMul(*transposed), a, b, narrow(m, n), types="h")
    check(MatMul(*transposed, wide=True), a, b, types="f")
    check(MatMul(*transposed, wide=True), a, b, wide(m, n), types="f")


def test_batches_of_products_are_jaxs() -> None:
    a, b = narrow(2, 3, 4, 5), narrow(3, 5, 6)
    (found,) = check(MatMul(wide=True), a, b, types="f")
    exact = jnp.matmul(jnp.asarray(a), jnp.asarray(b), precision="highest", preferred_element_type=jnp.float32)
    np.testing.assert_allclose(found, exact, 1e-5, 1e-5)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("how", ["sum", "mean", "prod", "max", "min"])
def test_reductions(how: str, axes: tuple[int, ...]) -> None:
    x = narrow(5 if how == "prod" else 700, 3, 5)
    check(Reduce(how, axes), x, types="h")
    check(Reduce(how, axes, keepdims=True, wide=True), x, types="f")


def test_a_sum_in_bfloat16_would_have_stopped_growing() -> None:
    (found,) = run_op(Reduce("sum", (0,)), np.ones((1000, 3), BF16))
    assert (found == 1000).all()


@pytest.mark.parametrize("shape", [(3, 5, 4, 3), (2, 3, 300, 240)])
def test_batch_normalisation(shape: tuple[int, ...]) -> None:
    x, g, n = narrow(*shape), narrow(*shape), shape[1]
    check(ChannelMoments(), x, types="ff")
    check(BatchNormTrain(1e-5), x, wide(n), wide(n), types="hff")
    check(BatchNorm(1e-5), x, wide(n), wide(n), wide(n), positive(n), types="h")
    check(BatchNorm(1e-5), x, *(vector.astype(BF16) for vector in (wide(n), wide(n), wide(n), positive(n))), types="h")
    check(BatchNormGrad(1e-5), x, wide(n), wide(n), positive(n), g, types="hff")
    check(ChannelSums(), x, wide(n), g, types="ff")


@pytest.mark.parametrize("shape", [(4, 6, 7), (1000, 200)])
def test_row_normalisation_and_softmax(shape: tuple[int, ...]) -> None:
    axis, n = len(shape) - 1, shape[-1]
    x, g, scale, bias = narrow(*shape), narrow(*shape), wide(n), wide(n)
    y, mean, r = check(LayerNorm(axis, 1e-5), x, scale, bias, types="hff")
    check(LayerNorm(axis, 1e-5), x, types="hff")
    check(LayerNorm(axis, 1e-5), x, scale.astype(BF16), bias.astype(BF16), types="hff")
    check(LayerNormGrad(axis), x, scale, mean, r, g, types="hff")
    check(LayerNormGrad(axis), x, scale.astype(BF16), mean, r, g, types="hhh")
    check(LayerNormGrad(axis, scaled=False), x, mean, r, g, types="h")
    check(LayerNormGrad(axis), x, scale, mean, r, g, narrow(*shape), types="hff")
    _, r = check(RMSNorm(axis, 1e-5), x, scale, types="hf")
    check(RMSNormGrad(axis), x, scale, r, g, types="hf")
    for forward, backward in ((Softmax(axis), SoftmaxGrad(axis)), (LogSoftmax(axis), LogSoftmaxGrad(axis))):
        (y,) = check(forward, x, types="h")
        check(backward, y, g, types="h")


def test_softmax_is_jaxs() -> None:
    x = narrow(5, 9)
    (found,) = run_op(Softmax(1), x)
    np.testing.assert_allclose(found.astype(np.float32), jax.nn.softmax(x.astype(np.float32)), HALF_UNIT)


@pytest.mark.parametrize(("shape", "axis"), [((6, 10), 1), ((3, 7, 4, 5), 1), ((300, 1000), 1)])
def test_cross_entropy(shape: tuple[int, ...], axis: int) -> None:
    logits, items = narrow(*shape), shape[:axis] + shape[axis + 1 :]
    target = RNG.integers(0, shape[axis], items)
    target.reshape(-1)[0] = -100
    _, lse = check(CrossEntropy(axis), logits, target, types="ff")
    check(CrossEntropyGrad(axis), logits, target, lse, wide(*items), types="h")


@pytest.mark.parametrize("sizes", [(10, 6, 9, 4), (10, 6, 9, 256), (20, 300, 2000, 8)])
@pytest.mark.parametrize("is_wide", [False, True])
def test_linear_cross_entropy(sizes: tuple[int, int, int, int], is_wide: bool) -> None:
    rows, depth, classes, chunk = sizes
    h, w = narrow(rows, depth), (wide(classes, depth) / np.sqrt(depth)).astype(BF16)
    target = RNG.integers(0, classes, rows)
    op, of_w = LinearCrossEntropy(chunk, wide=is_wide), "f" if is_wide else "h"
    check(op, h, w, target, types=f"fh{of_w}")
    check(op, h, w, target, wide(classes), types=f"fh{of_w}f")
    check(op, h, w, target, narrow(classes), types=f"fh{of_w}h")


@pytest.mark.parametrize(("kernel", "stride", "pad"), [(3, 2, 1), (2, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (2, 3, 130, 260)])
def test_pooling(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> None:
    x, around = narrow(*shape), ((kernel,) * 2, (stride,) * 2, ((pad, pad),) * 2, (1, 1))
    y, index = run_op(MaxPool(*around, save_index=True), x)
    for found, wanted in zip((y, index), run_op(MaxPool(*around, save_index=True), x.astype(np.float32))):
        np.testing.assert_array_equal(found.astype(np.float32), wanted)
    g = narrow(*y.shape)
    check(MaxPoolGrad(*around, x.shape), index, g, types="h")
    check(AvgPool(*around), x, types="h")
    check(AvgPoolGrad(*around, shape=x.shape), g, types="h")


def test_attention_beside_a_wide_mask() -> None:
    q, k, v, g = (narrow(2, 3, 6, 4) for _ in range(4))
    mask = np.where(RNG.random((1, 1, 6, 6)) < 0.3, -np.inf, 0.0).astype(np.float32)
    mask[..., 0] = 0.0
    # Where scores and probabilities are of order 1, float32 errs by some units of 2^-24 in each of the few terms.
    o, lse = check(Attention(0.5), q, k, v, mask, types="hf")
    exact = run_op(AttentionGrad(0.5), *(x.astype(np.float32) for x in (q, k, v, o)), lse, g.astype(np.float32), mask)
    for found, wanted in zip(run_op(AttentionGrad(0.5), q, k, v, o, lse, g, mask), exact, strict=True):
        assert found.dtype == BF16
        np.testing.assert_allclose(found.astype(np.float32), wanted, HALF_UNIT, 1e-5)


X, G, SCALE, ROWS = narrow(6, 7), narrow(6, 7), wide(7), positive(6)
IMAGES, CHANNELS = narrow(3, 5, 4, 3), positive(5)


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (LayerNorm(1, 1e-5), [X, SCALE, SCALE]),
        (RMSNorm(1, 1e-5), [X, SCALE]),
        (LayerNormGrad(1), [X, SCALE, ROWS, ROWS, G]),
        (LayerNormGrad(1), [X, SCALE, ROWS, ROWS, G, X]),
        (LayerNormGrad(1, scaled=False), [X, ROWS, ROWS, G, X]),
        (RMSNormGrad(1), [X, SCALE, ROWS, G, X]),
        (RMSNormGrad(1), [X, SCALE, ROWS, G]),
        (Softmax(1), [X]),
        (LogSoftmax(1), [X]),
        (SoftmaxGrad(1), [X, G]),
        (LogSoftmaxGrad(1), [X, G]),
        (BatchNorm(1e-5), [IMAGES, *[CHANNELS] * 4]),
        (BatchNormGrad(1e-5), [IMAGES, *[CHANNELS] * 3, IMAGES]),
        (ChannelMoments(), [IMAGES]),
        (ChannelSums(), [IMAGES, CHANNELS, IMAGES]),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_decompositions(op: Op, inputs: list[np.ndarray]) -> None:
    for found, wanted in zip(decomposed(op, *inputs), run_op(op, *inputs), strict=True):
        assert found.dtype == wanted.dtype
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_allclose(found, wanted, 2 * HALF_UNIT, SUMS * float(np.abs(wanted).max()))
