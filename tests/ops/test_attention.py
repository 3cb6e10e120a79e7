"""Attention against JAX's, its gradients against JAX's and finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Fill, GraphBuilder, Kind, TensorType, Value, as_dtype
from foreplan.ops.attention import blocks as attention_blocks
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention, attention
from foreplan.ops.shape import reshape
from tests.ops.check import check_vjp, decomposed, run_op, type_of
from tests.oracle.peers import jax, jit, jnp
from tests.profile import pairs, pick, values

RNG = np.random.default_rng(0)
FIRST = RNG.bit_generator.state
BOTH = [(causal, heads_last) for causal in (False, True) for heads_last in (False, True)]
SHAPES = [(2, 4, 4, 6, 6, 8, 8), (1, 4, 2, 5, 9, 3, 4), (2, 2, 1, 9, 5, 4, 2), (1, 3, 3, 300, 300, 8, 8)]


@pytest.fixture(autouse=True)
def numbers_begin_anew() -> None:
    """What a test draws does not depend on which tests ran before it."""
    RNG.bit_generator.state = FIRST


def sample(shape: tuple[int, ...], dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch, heads, kv_heads, queries, keys, depth, value_depth = shape
    q = RNG.standard_normal((batch, heads, queries, depth)).astype(dtype)
    k = RNG.standard_normal((batch, kv_heads, keys, depth)).astype(dtype)
    v = RNG.standard_normal((batch, kv_heads, keys, value_depth)).astype(dtype)
    return q, k, v


@jit(static_argnames=("causal", "scale"))
def reference(q, k, v, mask, g, *, causal: bool, scale: float):
    """(o, lse, gradients of q, k, v, mask) of attention by its definition, in JAX, of heads-first arrays."""

    def forward(q, k, v, mask):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        s = jnp.einsum("nhid,nhjd->nhij", q, k) * scale + mask
        if causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, -jnp.inf)
        return jnp.einsum("nhij,nhjd->nhid", jax.nn.softmax(s, -1), v), jax.nn.logsumexp(s, -1)

    o, pull, lse = jax.vjp(forward, q, k, v, mask, has_aux=True)
    return o, lse, pull(g)


@pytest.fixture(autouse=True)
def _float64() -> object:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("shape", "causal", "heads_last"), pairs(SHAPES, (False, True), (False, True)))
def test_against_jax(shape: tuple[int, ...], causal: bool, heads_last: bool) -> None:
    q, k, v = sample(shape)
    mask = RNG.standard_normal((1, shape[1], 1, shape[4]))
    g = RNG.standard_normal((*q.shape[:3], v.shape[3]))
    wanted, lse, gradients = reference(q, k, v, mask, g, causal=causal, scale=0.3)
    order = (0, 2, 1, 3) if heads_last else (0, 1, 2, 3)
    q, k, v, g = (np.ascontiguousarray(x.transpose(order)) for x in (q, k, v, g))
    o, found = run_op(Attention(0.3, causal, heads_last), q, k, v, mask)
    np.testing.assert_allclose(o.transpose(order), wanted, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found, lse, rtol=1e-10)
    *rest, dmask = run_op(AttentionGrad(0.3, causal, heads_last, True), q, k, v, o, found, g, mask)
    for got, gradient in zip(rest, gradients):
        np.testing.assert_allclose(got.transpose(order), gradient, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(dmask, gradients[3], rtol=1e-9, atol=1e-10)


def test_float32_of_real_size_against_jax() -> None:
    q, k, v = sample((1, 2, 2, 400, 400, 64, 64))
    g = RNG.standard_normal(q.shape)
    wanted, _, gradients = reference(q, k, v, np.zeros((1, 1, 1, 1)), g, causal=True, scale=0.125)
    q, k, v, g = (x.astype(np.float32) for x in (q, k, v, g))
    o, lse = run_op(Attention(0.125, True), q, k, v)
    np.testing.assert_allclose(o, wanted, rtol=1e-4, atol=1e-5)
    own = jax.nn.dot_product_attention(*(jnp.asarray(x.swapaxes(1, 2)) for x in (q, k, v)), is_causal=True)
    np.testing.assert_allclose(o, own.swapaxes(1, 2), rtol=1e-3, atol=1e-5)
    for got, gradient in zip(run_op(AttentionGrad(0.125, True), q, k, v, o, lse, g), gradients):
        np.testing.assert_allclose(got, gradient, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(("causal", "heads_last"), pick([(True, False)], [(True, False), (False, True)], BOTH))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_summed_in_float32(dtype: str, shape: tuple[int, ...], causal: bool, heads_last: bool) -> None:
    """Against float64 on the same narrow numbers: only the results are rounded to the narrow type."""
    kind = as_dtype(dtype).numpy
    tolerance = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    q, k, v = (x.astype(kind) for x in sample(shape))
    mask = RNG.standard_normal((1, shape[1], 1, shape[4])).astype(kind)
    g = RNG.standard_normal((*q.shape[:3], v.shape[3])).astype(kind)
    full = [x.astype(np.float64) for x in (q, k, v, mask, g)]
    wanted, lse, gradients = reference(*full, causal=causal, scale=0.3)
    order = (0, 2, 1, 3) if heads_last else (0, 1, 2, 3)
    q, k, v, g = (np.ascontiguousarray(x.transpose(order)) for x in (q, k, v, g))
    o, found = run_op(Attention(0.3, causal, heads_last), q, k, v, mask)
    assert o.dtype == kind and found.dtype == np.float32
    np.testing.assert_allclose(o.transpose(order).astype(np.float64), wanted, rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(found, lse, rtol=1e-5, atol=1e-6)
    *rest, dmask = run_op(AttentionGrad(0.3, causal, heads_last, True), q, k, v, o, found, g, mask)
    # The gradient reads the rounded output.
    for got, gradient in zip(rest, gradients):
        size = np.abs(gradient).max()
        np.testing.assert_allclose(
            got.transpose(order).astype(np.float64), gradient, rtol=tolerance, atol=2 * tolerance * size
        )
    assert dmask.dtype == np.float32
    np.testing.assert_allclose(dmask, gradients[3], rtol=tolerance, atol=2 * tolerance * np.abs(gradients[3]).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrow_mask_has_a_narrow_gradient(dtype: str) -> None:
    b = GraphBuilder()
    kind = as_dtype(dtype)
    q, k, v = (b.store(name, TensorType(kind, (1, 2, 3, 4)), Kind.PARAMETER, Fill(0.5)) for name in "qkv")
    mask = b.store("mask", TensorType(kind, (3, 3)), Kind.PARAMETER, Fill(0.0))
    o, lse = b.node(Attention(0.5), q, k, v, reshape(b, mask, (1, 1, 3, 3)))
    node = b.nodes[-1]
    gradients = node.op.vjp(b, node.inputs, (o, lse), (o, None))
    assert [x.type for x in gradients if x is not None] == [x.type for x in node.inputs]


@pytest.mark.parametrize(
    ("mask_shape", "causal"), values([None, (5,), (2, 1, 1, 5), (1, 4, 3, 1), (2, 4, 3, 5), (3, 5)], [True, False])
)
def test_gradients_by_differences(mask_shape: tuple[int, ...] | None, causal: bool) -> None:
    arrays = [*sample((2, 4, 2, 3, 5, 4, 3)), *([] if mask_shape is None else [RNG.standard_normal(mask_shape)])]

    def build(b: Builder, q: Value, k: Value, v: Value, mask: Value | None = None) -> Value:
        return attention(b, q, k, v, mask, causal=causal)

    check_vjp(build, *arrays, tol=1e-5)


def test_small_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("SCORE_BYTES", "MOST_SCORE_BYTES"):
        monkeypatch.setattr(attention_blocks, limit, 200)
    monkeypatch.setattr(attention_blocks, "QUERIES", 3)
    for shape in SHAPES[:3]:
        for causal in (False, True):
            test_against_jax(shape, causal, False)
            test_narrow_types_are_summed_in_float32("float16", shape, causal, False)


def test_rows_without_any_key_are_zero() -> None:
    q, k, v = sample((1, 2, 2, 3, 4, 5, 5))
    mask = np.zeros((1, 1, 3, 4))
    mask[:, :, 1] = -np.inf
    mask[:, :, 2, 2:] = -np.inf
    o, lse = run_op(Attention(0.5), q, k, v, mask)
    assert (o[:, :, 1] == 0).all() and np.isfinite(lse).all()
    g = RNG.standard_normal(o.shape)
    dq, dk, dv = run_op(AttentionGrad(0.5), q, k, v, o, lse, g, mask)
    wanted, _, gradients = reference(q, k, v, mask, g, causal=False, scale=0.5)
    for got, full in ((o, wanted), (dq, gradients[0])):
        np.testing.assert_allclose(got[:, :, [0, 2]], full[:, :, [0, 2]], rtol=1e-9)
    assert (dq[:, :, 1] == 0).all() and all(np.isfinite(x).all() for x in (dk, dv))


@pytest.mark.parametrize(
    ("dtype", "shape", "causal", "heads_last"),
    pairs(["float64", "float16"], SHAPES[:3], (False, True), (False, True)),
)
def test_decomposition(shape: tuple[int, ...], causal: bool, heads_last: bool, dtype: str) -> None:
    order = (0, 2, 1, 3) if heads_last else (0, 1, 2, 3)
    arrays = [np.ascontiguousarray(x.transpose(order)) for x in sample(shape, dtype)]
    arrays.append(np.where(RNG.random((shape[0], 1, 1, shape[4])) < 0.3, -np.inf, 0.0).astype(dtype))
    op = Attention(0.4, causal, heads_last)
    for found, wanted in zip(decomposed(op, *arrays), run_op(op, *arrays), strict=True):
        tolerance = 1e-9 if dtype == "float64" else 2e-3 if wanted.dtype == dtype else 1e-5
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-3 * tolerance)


def test_refusals() -> None:
    b = GraphBuilder()
    q, k, v = (b.input(name, type_of(x)) for name, x in zip("qkv", sample((2, 3, 2, 4, 4, 5, 5))))
    with pytest.raises(ShapeError, match="cannot share"):
        attention(b, q, k, v)
    m = b.input("m", type_of(np.zeros((3, 4))))
    with pytest.raises(ShapeError, match="broadcast"):
        attention(b, k, k, v, m)
    with pytest.raises(ShapeError, match="do not fit"):
        attention(b, k, q, v)
