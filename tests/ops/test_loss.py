"""Cross-entropy against JAX and SciPy, gradients against JAX and differences."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special

from foreplan.base.errors import ShapeError
from foreplan.graph import Array, Builder, Fill, GraphBuilder, Kind, Normal, TensorType, Value, as_dtype
from foreplan.ops.linear_cross_entropy import LOGITS_BYTES, LinearCrossEntropy, _is_one, linear_cross_entropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad, cross_entropy
from foreplan.ops.map import elementwise
from tests.ops.check import check_vjp, pull_back, run_op, type_of
from tests.oracle.peers import jax, jit, jnp

RNG = np.random.default_rng(0)
SHAPES = [((7,), 0), ((4, 9), 1), ((9, 4), 0), ((2, 5, 3, 4), 1), ((5, 40_000), 1), ((2, 6, 20_000), 1), ((0, 4), 1)]


def sample(shape: tuple[int, ...], axis: int, ignore: int = -100) -> tuple[np.ndarray, np.ndarray]:
    logits = RNG.standard_normal(shape) * 4
    target = RNG.integers(0, shape[axis], np.delete(shape, axis))
    return logits, np.where(RNG.random(target.shape) < 0.2, ignore, target) if target.ndim else target


def expected(logits: np.ndarray, target: np.ndarray, axis: int, ignore: int) -> tuple[np.ndarray, np.ndarray]:
    """(loss, gradient of its sum) by definition."""
    place = np.expand_dims(np.where(target == ignore, 0, target), axis)
    loss = -np.take_along_axis(scipy.special.log_softmax(logits, axis), place, axis).squeeze(axis)
    one_hot = np.zeros_like(logits)
    np.put_along_axis(one_hot, place, 1.0, axis)
    counts = np.expand_dims(target != ignore, axis)
    return np.where(target == ignore, 0, loss), (scipy.special.softmax(logits, axis) - one_hot) * counts


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("shape,axis", SHAPES)
def test_cross_entropy(shape: tuple[int, ...], axis: int, ignore: int, dtype: str) -> None:
    logits, target = sample(shape, axis, ignore)
    wanted, gradient = expected(logits, target, axis, ignore)
    target = target.astype(dtype)
    loss, lse = run_op(CrossEntropy(axis, ignore), logits, target)
    np.testing.assert_allclose(loss, wanted, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse, scipy.special.logsumexp(logits, axis), rtol=1e-12)
    ones = np.ones_like(loss)
    (d,) = run_op(CrossEntropyGrad(axis, ignore), logits, target, lse, ones)
    np.testing.assert_allclose(d, gradient, rtol=1e-9, atol=1e-12)
    g = RNG.standard_normal(loss.shape)
    (d,) = run_op(CrossEntropyGrad(axis, ignore), logits, target, lse, g)
    np.testing.assert_allclose(d, gradient * np.expand_dims(g, axis), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape,axis", [((5, 4), -1), ((2, 4, 3), 1)])
def test_gradients_by_differences(shape: tuple[int, ...], axis: int) -> None:
    logits, target = sample(shape, axis)
    check_vjp(lambda b, x, t: cross_entropy(b, x, t, axis), logits, target)

    def both(b: Builder, x: Value, t: Value) -> list[Value]:
        return list(b.node(CrossEntropy(axis % len(shape)), x, t))

    check_vjp(both, logits, target)
    check_vjp(lambda b, x, t: both(b, x, t)[1], logits, target)


def test_float32_keeps_small_losses() -> None:
    logits = np.array([[30.0, 0.0, 1.0], [5e3, -5e3, 4.999e3]], np.float32)
    loss, _ = run_op(CrossEntropy(1), logits, np.array([0, 0]))
    np.testing.assert_allclose(loss, [0.0, np.log1p(np.exp(-1.0))], rtol=1e-4, atol=1e-7)


def test_a_target_that_is_no_class_shows() -> None:
    logits, target = sample((4, 3), 1)[0], np.array([0, 3, -1, -100])
    loss, lse = run_op(CrossEntropy(1), logits, target)
    assert list(np.isnan(loss)) == [False, True, True, False]
    (d,) = run_op(CrossEntropyGrad(1), logits, target, lse, np.ones(4))
    assert np.isnan(d[1:3]).all() and np.isfinite(d[[0, 3]]).all()
    h, w = RNG.standard_normal((4, 2)), RNG.standard_normal((3, 2))
    assert np.isnan(run_op(LinearCrossEntropy(), h, w, target)[0])


def linear(h: jax.Array, w: jax.Array, target: jax.Array, ignore: int) -> jax.Array:
    counts = target != ignore
    logp = jax.nn.log_softmax(h @ w.T, -1)
    picked = jnp.take_along_axis(logp, jnp.where(counts, target, 0)[:, None], 1)[:, 0]
    return -jnp.where(counts, picked, 0.0).sum() / counts.sum()


@jit()
def linear_and_gradients(h: jax.Array, w: jax.Array, target: jax.Array, ignore: int) -> tuple[jax.Array, ...]:
    return jax.value_and_grad(linear, (0, 1))(h, w, target, ignore)


@pytest.mark.parametrize(
    "rows,classes,chunk,ignore", [(7, 5, 256, -100), (13, 11, 4, -100), (6, 9, 1, 3), (6, 70_000, 4, 3)]
)
def test_linear_cross_entropy(rows: int, classes: int, chunk: int, ignore: int) -> None:
    h, w = RNG.standard_normal((rows, 6)), RNG.standard_normal((classes, 6))
    target = np.where(np.arange(rows) % 4 == 1, ignore, RNG.integers(0, classes, rows))
    with jax.enable_x64(True):
        loss, (dh, dw) = linear_and_gradients(h, w, target, ignore)
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 2e-4)):
        found = run_op(LinearCrossEntropy(chunk, ignore), h.astype(dtype), w.astype(dtype), target.astype(np.int32))
        for got, wanted in zip(found, (loss, dh, dw)):
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("rows,classes,chunk", [(7, 5, 256), (13, 11, 4)])
def test_linear_cross_entropy_with_a_bias(rows: int, classes: int, chunk: int, mean: bool) -> None:
    h, w, bias = (RNG.standard_normal(shape) for shape in ((rows, 6), (classes, 6), classes))
    target = np.where(np.arange(rows) % 4 == 1, -100, RNG.integers(0, classes, rows))
    count = 1 if mean else (target != -100).sum()

    def loss(h: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        columns = jnp.ones((rows, 1))
        return count * linear(jnp.hstack([h, columns]), jnp.hstack([w, bias[:, None]]), target, -100)

    with jax.enable_x64(True):
        wanted = jit()(jax.value_and_grad(loss, (0, 1, 2)))(h, w, bias)
    found = run_op(LinearCrossEntropy(chunk, mean=mean), h, w, target, bias)
    for got, expected_one in zip(found, (wanted[0], *wanted[1])):
        np.testing.assert_allclose(got, expected_one, rtol=1e-9, atol=1e-10)
    check_vjp(lambda b, h, w, t, c: linear_cross_entropy(b, h, w, t, c, chunk=chunk, mean=mean), h, w, target, bias)


def test_linear_cross_entropy_of_nothing() -> None:
    h, w = RNG.standard_normal((3, 4)), RNG.standard_normal((5, 4))
    assert all((x == 0).all() for x in run_op(LinearCrossEntropy(), h, w, np.full(3, -100)))
    assert all((x == 0).all() for x in run_op(LinearCrossEntropy(), h[:0], w, np.zeros(0, np.int64)))


def test_tiny_probabilities_become_zero_not_denormal() -> None:
    h, w = np.array([[1.0]], np.float32), np.array([[0.0], [-50.0], [-75.0], [-95.0]], np.float32)
    dw = run_op(LinearCrossEntropy(), h, w, np.array([0]))[2]
    assert not ((np.abs(dw) < np.finfo(np.float32).tiny) & (dw != 0)).any()
    np.testing.assert_allclose(dw[1], np.exp(-50.0), rtol=1e-5)


def test_linear_cross_entropy_gradient() -> None:
    h, w, target = RNG.standard_normal((5, 3)), RNG.standard_normal((4, 3)), np.array([0, 3, -100, 1, 1])

    def build(b: Builder, h: Value, w: Value, t: Value) -> Value:
        loss = linear_cross_entropy(b, h, w, t, chunk=2)
        return elementwise(b, lambda x: x * x, loss)

    check_vjp(build, h, w, target)
    b = GraphBuilder()
    values = [b.input(f"x{i}", type_of(x)) for i, x in enumerate((h, w, target))]
    loss = linear_cross_entropy(b, *values)
    made = list(b.nodes)
    ones = (Fill(1.0), Array(np.ones(())))
    for i, init in enumerate(ones):
        one = b.store(f"one{i}", loss.type, Kind.CONSTANT, init)
        assert pull_back(b, made, {loss: one}, values[:2]) == list(made[-1].outputs[1:]) and b.nodes == made
    two = b.store("two", loss.type, Kind.CONSTANT, Fill(2.0))
    assert pull_back(b, made, {loss: two}, values[:2]) != list(made[-1].outputs[1:])


def test_workspace() -> None:
    def bytes_for(rows: int, classes: int, depth: int) -> int:
        b = GraphBuilder()
        h, w = (b.input(name, type_of(np.empty((n, depth), np.float32))) for name, n in (("h", rows), ("w", classes)))
        linear_cross_entropy(b, h, w, b.input("t", type_of(np.empty(rows, np.int64))))
        (node,) = b.nodes
        return node.op.workspace([x.type for x in node.inputs], [x.type for x in node.outputs])

    for classes in (10, 50_257, 128_256, 1_000_000):
        assert bytes_for(4096, classes, 8) <= 64 * 2**20
    assert bytes_for(4096, 50_257, 8) > 256 * 50_257 * 4
    assert LOGITS_BYTES < 64 * 2**20


def test_ranges_and_refusals() -> None:
    b = GraphBuilder()
    logits, target = b.input("x", type_of(np.zeros((4, 5)))), b.input("t", type_of(np.zeros(5, np.int64)))
    with pytest.raises(ShapeError, match=r"integers of shape \[4\]"):
        cross_entropy(b, logits, target)
    with pytest.raises(ShapeError, match="the target must be 4 integers"):
        linear_cross_entropy(b, logits, logits, target)
    with pytest.raises(ShapeError, match=r"the bias of 4 classes must be float64\[4\]"):
        linear_cross_entropy(b, logits, logits, b.input("u", target.type.with_shape((4,))), b.input("c", logits.type))
    assert CrossEntropy(1).valid_range(1, [logits.type, target.type]) == (0, 4, -100)
    assert CrossEntropy(1, 7).valid_range(1, [logits.type, target.type]) == (0, 4, 7)
    assert LinearCrossEntropy(1, -1).valid_range(2, [logits.type, logits.type, target.type]) == (0, 3, -1)


def test_only_a_constant_that_is_one_everywhere_is_one() -> None:
    b, type = GraphBuilder(), TensorType(as_dtype("float32"), (2,))
    contents = (Fill(1.0), Array(np.ones(2, np.float32)), Fill(2.0), Array(np.array([1, 2], np.float32)), Normal(1.0))
    constants = [b.store(f"c{i}", type, Kind.CONSTANT, each) for i, each in enumerate(contents)]
    assert [_is_one(value) for value in constants] == [True, True, False, False, False]
    assert not _is_one(b.input("x", type)) and not _is_one(b.store("w", type, Kind.PARAMETER, Fill(1.0)))
