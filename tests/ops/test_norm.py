"""Normalisation against its formulas in float64, JAX's derivatives and differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import Fill, GraphBuilder, Kind, Op, TensorType, Value, as_dtype
from foreplan.graph.types import tensor_type
from foreplan.ops.norm import channels as channels_module
from foreplan.ops.norm import rows as row_norm_module
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, BatchNormTrain, ChannelMoments, batch_norm
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad, group_norm, layer_norm, rms_norm
from tests.ops.check import built, check_vjp, decomposed, evaluate, refused, run_op, type_of
from tests.oracle.peers import jax, jit, jnp
from tests.profile import few

EPS = 1e-3
SHAPES = [(4, 3, 5, 6), (8, 5), (2, 3, 17), (1, 2, 3, 4, 5), (3, 1, 2, 2)]


@pytest.fixture(params=["whole", "small blocks"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small blocks":
        monkeypatch.setattr(channels_module, "CHANNEL_BLOCK", 64)
        monkeypatch.setattr(channels_module, "BLOCK", 7)
        monkeypatch.setattr(row_norm_module, "ROW_BLOCK", 40)


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _vectors(count: int, n: int) -> list[np.ndarray]:
    rng = _rng()
    return [rng.uniform(0.5, 1.5, n) for _ in range(count)]


def _per_channel(vector: Any, rank: int) -> Any:
    return vector.reshape(-1, *[1] * (rank - 2))


def _batch_norm(x: Any, scale: Any, bias: Any) -> Any:
    axes = (0, *range(2, x.ndim))
    mean, variance = x.mean(axes), x.var(axes)
    m, v, s, c = (_per_channel(vector, x.ndim) for vector in (mean, variance, scale, bias))
    return (x - m) / jnp.sqrt(v + EPS) * s + c, mean, variance


@jit()
def _batch_reference(x: Any, scale: Any, bias: Any, g: Any) -> Any:
    found, pull = jax.vjp(_batch_norm, x, scale, bias)
    return found, pull((g, jnp.zeros_like(scale), jnp.zeros_like(scale)))


def _check(op: Op, arrays: list[np.ndarray], expected: list[Any], tolerance: float = 2e-6) -> None:
    """The kernel in both precisions, and the decomposition, against float64 results."""
    for dtype, limit in ((np.float64, 1e-11), (np.float32, tolerance)):
        inputs = [x.astype(dtype) if x.dtype.kind == "f" else x for x in arrays]
        for found in (run_op(op, *inputs), decomposed(op, *inputs)):
            assert len(found) == len(expected)
            for got, wanted in zip(found, expected):
                wanted = np.asarray(wanted)
                np.testing.assert_allclose(got, wanted, limit, limit * max(1, np.abs(wanted).max()) * 4)


@pytest.mark.parametrize("shape", few([(shape,) for shape in SHAPES], (0, 1, 4)))
def test_batch_norm_train_and_its_gradient(shape: tuple[int, ...]) -> None:
    x = _rng().standard_normal(shape) * 2 + 3
    scale, bias = _vectors(2, shape[1])
    g = _rng().standard_normal(shape)
    with jax.enable_x64(True):
        (y, mean, variance), (dx, dscale, dbias) = _batch_reference(x, scale, bias, g)
    _check(BatchNormTrain(EPS), [x, scale, bias], [y, mean, variance], 2e-5)
    arrays = [x, scale, np.asarray(mean), np.asarray(variance), g]
    _check(BatchNormGrad(EPS), arrays, [dx, dscale, dbias], 5e-5)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if math.prod(shape) % 8 == 0])
def test_the_gradient_of_what_a_mask_lets_through(shape: tuple[int, ...], keeps: bool) -> None:
    x, g, more = (_rng().standard_normal(shape) for _ in range(3))
    scale, bias = _vectors(2, shape[1])
    truth = _rng().random(shape) > 0.3
    with jax.enable_x64(True):
        masked = np.where(truth, g + more, 0)
        (_, mean, variance), wanted = _batch_reference(x, scale, bias, masked)
    bits = np.packbits(truth.reshape(-1), bitorder="little")
    op = MaskedBatchNormGrad(EPS, "where(a0, (a1 + a2), 0.0)", keeps)
    _check(op, [x, scale, np.asarray(mean), np.asarray(variance), bits, g, more], [*wanted, *[masked] * keeps], 5e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_channel_moments(shape: tuple[int, ...]) -> None:
    x = _rng().standard_normal(shape) * 2 + 3
    axes = (0, *range(2, x.ndim))
    _check(ChannelMoments(), [x], [x.mean(axes), x.var(axes)], 2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_inference(shape: tuple[int, ...]) -> None:
    x = _rng().standard_normal(shape)
    scale, bias, mean, variance = _vectors(4, shape[1])
    m, v, s, c = (_per_channel(vector, x.ndim) for vector in (mean, variance, scale, bias))
    _check(BatchNorm(EPS), [x, scale, bias, mean, variance], [(x - m) / np.sqrt(v + EPS) * s + c])


def test_reapplied_from_saved_statistics_bit_for_bit() -> None:
    x = (_rng().standard_normal((8, 6, 9, 9)) * 5 + 2).astype(np.float32)
    scale, bias = (vector.astype(np.float32) for vector in _vectors(2, 6))
    y, mean, variance = run_op(BatchNormTrain(EPS), x, scale, bias)
    again = run_op(BatchNorm(EPS), x, scale, bias, mean, variance)[0]
    assert y.tobytes() == again.tobytes()


def test_variance_of_a_large_mean() -> None:
    x = (_rng().standard_normal((4, 2, 30, 30)) + 3000).astype(np.float32)
    _, mean, variance = run_op(BatchNormTrain(1e-5), x, np.ones(2, np.float32), np.zeros(2, np.float32))
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(variance, exact.var((0, 2, 3)), rtol=1e-4)


def test_batch_norm_differences() -> None:
    x = _rng().standard_normal((3, 2, 2, 3))
    scale, bias, mean, variance = _vectors(4, 2)
    check_vjp(lambda b, *v: b.node(BatchNormTrain(EPS), *v)[0], x, scale, bias)
    check_vjp(lambda b, *v: b.node(BatchNormTrain(EPS), *v), x, scale, bias)
    check_vjp(lambda b, *v: b.node(BatchNormTrain(EPS), *v)[1:], x, scale, bias, wrt=[0])
    check_vjp(lambda b, *v: batch_norm(b, *v, epsilon=EPS), x, scale, bias, mean, variance)


class _Training:
    ranks = 1

    def __init__(self) -> None:
        self.updates: dict[Value, Value] = {}

    def next_content(self, stored: Value) -> Value:
        return self.updates.get(stored, stored)

    def update(self, stored: Value, new: Value) -> None:
        self.updates[stored] = new


def test_training_updates_running_statistics() -> None:
    x = (_rng().standard_normal((4, 3, 2, 2)) * 2 + 1).astype(np.float32)
    vector = TensorType(as_dtype("float32"), (3,))
    b, training = GraphBuilder(), _Training()
    values = [b.input("x", type_of(x))]
    values += [b.store(n, vector, Kind.PARAMETER, Fill(v)) for n, v in (("scale", 1.5), ("bias", 0.5))]
    values += [b.store(n, vector, Kind.BUFFER, Fill(v)) for n, v in (("mean", 10.0), ("variance", 20.0))]
    made = BatchNorm(EPS, momentum=0.8).for_training(b, values, training)  # type: ignore[arg-type]
    assert made is not None and list(training.updates) == values[3:]
    found = evaluate(b.finish({"y": made[0]}, updates=training.updates), {"x": x})
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    np.testing.assert_allclose(found[training.updates[values[3]]], 0.8 * 10 + 0.2 * mean, rtol=1e-6)
    np.testing.assert_allclose(found[training.updates[values[4]]], 0.8 * 20 + 0.2 * variance, rtol=1e-6)
    y = (x - _per_channel(mean, 4)) / np.sqrt(_per_channel(variance, 4) + EPS) * 1.5 + 0.5
    np.testing.assert_allclose(found[made[0]], y, rtol=1e-4, atol=1e-5)


def _row_norm(x: Any, scale: Any, bias: Any, axis: int, centred: bool) -> Any:
    axes = tuple(range(axis, x.ndim))
    mean = x.mean(axes, keepdims=True) if centred else 0.0
    r = 1 / jnp.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + EPS)
    return (x - mean) * r * scale + bias, jnp.squeeze(mean, axes) if centred else None, jnp.squeeze(r, axes)


@jit(static_argnums=(4, 5))
def _row_reference(x: Any, scale: Any, bias: Any, g: Any, axis: int, centred: bool) -> Any:
    y, pull = jax.vjp(lambda x, s, c: _row_norm(x, s, c, axis, centred)[0], x, scale, bias)
    _, mean, r = _row_norm(x, scale, bias, axis, centred)
    return [y, *([mean] if centred else []), r], pull(g)


@pytest.mark.parametrize(
    ("shape", "axis"), few([((4, 6), 1), ((2, 3, 4), 2), ((2, 3, 4), 1), ((3, 4), 0), ((2, 5, 33), 2)], (2, 3, 4))
)
def test_row_norms_and_their_gradients(shape: tuple[int, ...], axis: int) -> None:
    x, g = _rng().standard_normal(shape) * 2 + 1, _rng().standard_normal(shape)
    scale, bias = _rng().uniform(0.5, 1.5, shape[axis:]), _rng().standard_normal(shape[axis:])
    one, zero = np.ones(shape[axis:]), np.zeros(shape[axis:])

    def reference(s: Any, c: Any, centred: bool) -> Any:
        return _row_reference(x, s, c, g, axis, centred)

    with jax.enable_x64(True):
        full, full_pull = reference(scale, bias, True)
        half, _ = reference(scale, zero, True)
        bare, bare_pull = reference(one, zero, True)
        rms, rms_pull = reference(scale, zero, False)
        rms_bare, rms_bare_pull = reference(one, zero, False)
    _check(LayerNorm(axis, EPS), [x, scale, bias], full)
    _check(LayerNorm(axis, EPS), [x, scale], half)
    _check(LayerNorm(axis, EPS), [x], bare)
    _check(RMSNorm(axis, EPS), [x, scale], rms)
    _check(RMSNorm(axis, EPS), [x], rms_bare)
    statistics = [np.asarray(v) for v in full[1:]]
    _check(LayerNormGrad(axis), [x, scale, *statistics, g], list(full_pull), 2e-5)
    _check(LayerNormGrad(axis, scaled=False), [x, *statistics, g], [bare_pull[0]], 2e-5)
    statistics = [np.asarray(rms[1])]
    _check(RMSNormGrad(axis), [x, scale, *statistics, g], list(rms_pull[:2]), 2e-5)
    _check(RMSNormGrad(axis, scaled=False), [x, *statistics, g], [rms_bare_pull[0]], 2e-5)
    _check(RMSNormGrad(axis), [x, scale, *statistics, g, x], [np.asarray(rms_pull[0]) + x, rms_pull[1]], 2e-5)
    statistics = [np.asarray(v) for v in full[1:]]
    _check(LayerNormGrad(axis), [x, scale, *statistics, g, x], [np.asarray(full_pull[0]) + x, *full_pull[1:]], 2e-5)
    _check(LayerNormGrad(axis, scaled=False), [x, *statistics, g, x], [np.asarray(bare_pull[0]) + x], 2e-5)


BUILDS: dict[str, tuple[Callable[..., Value], list[tuple[int, ...]]]] = {
    "layer": (lambda b, *v: layer_norm(b, *v), [(3, 5), (5,), (5,)]),
    "layer, scale only": (lambda b, *v: layer_norm(b, *v), [(3, 5), (5,)]),
    "layer, broadcast scale": (lambda b, *v: layer_norm(b, *v, axis=1), [(2, 3, 4), (4,), (3, 1)]),
    "layer, bare": (lambda b, *v: layer_norm(b, *v), [(3, 5)]),
    "layer, bias only": (lambda b, x, c: layer_norm(b, x, None, c), [(3, 5), (5,)]),
    "rms": (lambda b, *v: rms_norm(b, *v), [(3, 5), (5,)]),
    "group": (lambda b, *v: group_norm(b, v[0], 2, *v[1:]), [(2, 4, 2, 3), (4,), (4,)]),
    "group, scale only": (lambda b, *v: group_norm(b, v[0], 2, *v[1:]), [(2, 4, 3), (4,)]),
    "group, bias only": (lambda b, x, c: group_norm(b, x, 2, None, c), [(2, 4, 3), (4,)]),
    "instance": (lambda b, *v: group_norm(b, v[0], 3, *v[1:]), [(2, 3, 2, 3), (3,), (3,)]),
}


@pytest.mark.parametrize("name", BUILDS)
def test_row_norm_differences(name: str) -> None:
    build, shapes = BUILDS[name]
    check_vjp(build, *(np.random.default_rng(7).standard_normal(shape) for shape in shapes))


def test_group_and_instance_norm() -> None:
    x = _rng().standard_normal((2, 6, 3, 4))
    scale, bias = _vectors(2, 6)
    for groups, build in (
        (3, lambda b, *v: group_norm(b, v[0], 3, *v[1:], epsilon=EPS)),
        (6, lambda b, *v: group_norm(b, v[0], 6, *v[1:], epsilon=EPS)),
    ):
        (got,) = built(build, x, scale, bias)
        grouped = x.reshape(2, groups, -1)
        normal = (grouped - grouped.mean(2, keepdims=True)) / np.sqrt(grouped.var(2, keepdims=True) + EPS)
        expected = normal.reshape(x.shape) * _per_channel(scale, 4) + _per_channel(bias, 4)
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


def test_what_does_not_fit_is_refused() -> None:
    x, channel, row, bits = "float32[2,3,4]", "float32[3]", "float32[4]", "uint8[3]"
    refused("parameters", BatchNorm(EPS), x, *[channel] * 3, row)
    refused("floating-point", BatchNormTrain(EPS), "int32[2,3,4]", channel, channel)
    refused("gradient", BatchNormGrad(EPS), x, *[channel] * 3, row)
    masked = MaskedBatchNormGrad(EPS, "where(a0, a1, 0.0)")
    for given in ([x, *[channel] * 3, bits], [x, *[channel] * 3, bits, row], [x]):
        refused("needs a mask and tensors", masked, *given)
    refused("a bit for each element", masked, x, *[channel] * 3, "uint8[2]", x)
    refused("axis 3", LayerNorm(3, EPS), x, row)
    refused("at most 2", LayerNorm(2, EPS), x, channel)
    refused("statistics", LayerNormGrad(2), x, row, x)
    with pytest.raises(ShapeError, match="equal groups"):
        b = GraphBuilder()
        group_norm(b, b.input("x", tensor_type(x)), 2)


def test_the_gradient_widens_narrow_vectors_before_it_adds() -> None:
    """Sums over items and positions, and the deviation, are of float32 whatever type the vectors have."""
    rng = np.random.default_rng(0)
    dtype = as_dtype("bfloat16").numpy
    x, g = (rng.standard_normal((5, 16)).astype(dtype) for _ in range(2))
    scale, mean = (rng.standard_normal(16).astype(dtype) for _ in range(2))
    variance = rng.uniform(0.1, 2.0, 16).astype(dtype)
    found = run_op(BatchNormGrad(1e-5), x, scale, mean, variance, g)
    vectors = (vector.astype(np.float32) for vector in (scale, mean, variance))
    for narrow, wide in zip(found, run_op(BatchNormGrad(1e-5), x, *vectors, g)):
        np.testing.assert_array_equal(narrow, wide)
