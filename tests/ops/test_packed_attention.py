"""The packed gradient of attention against the separate one, whose own tests compare it with JAX."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from tests.ops.check import decomposed, refused, run_op, type_of

RNG = np.random.default_rng(0)


def operands(
    batch: int, positions: int, heads: int, kv_heads: int, depth: int, causal: bool, dtype: type = np.float64
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """x, (q, k, v) and (o, lse, g)."""
    x = RNG.standard_normal((batch, positions, (heads + 2 * kv_heads) * depth)).astype(dtype)
    every = x.reshape(batch, positions, -1, depth)
    parts = [np.ascontiguousarray(p) for p in np.split(every, [heads, heads + kv_heads], axis=2)]
    o, lse = run_op(Attention(0.3, causal, heads_last=True), *parts)
    return x, parts, [o, lse, RNG.standard_normal(o.shape).astype(dtype)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(2, 5, 2, 2, 3), (1, 7, 4, 2, 2), (2, 300, 1, 1, 4)])
def test_equals_the_gradients_side_by_side(sizes: tuple[int, int, int, int, int], causal: bool) -> None:
    x, parts, others = operands(*sizes, causal)
    (dx,) = run_op(PackedAttentionGrad(0.3, sizes[2], sizes[3], causal), x, *others)
    gradients = run_op(AttentionGrad(0.3, causal, heads_last=True), *parts, *others)
    np.testing.assert_allclose(dx, np.concatenate([g.reshape(*x.shape[:2], -1) for g in gradients], 2), rtol=1e-10)


def test_its_windows_are_its_arrays() -> None:
    """Also of an x whose positions and elements have gaps between them."""
    op = PackedAttentionGrad(0.3, 4, 2)
    memory = RNG.standard_normal((2, 5, 48))
    for x in (np.ascontiguousarray(memory[:, :, :24]), memory[:, ::2, :24], memory[:, :, ::2]):
        o = np.zeros((*x.shape[:2], 4, 3))
        types = op.unpacked_types([type_of(x), type_of(o), type_of(np.zeros((2, 4, x.shape[1]))), type_of(o)])[:3]
        found = op.unpacked_windows(Window(type_of(x), x.strides), types)
        split = np.split(x, [12, 18], axis=2)
        for (start, window), part in zip(found, split, strict=True):
            base = x if x.base is None else memory
            seen = np.ndarray(window.shape, np.float64, base.reshape(-1), start, window.strides)
            np.testing.assert_array_equal(seen.reshape(*x.shape[:2], -1), part)


def test_its_decomposition() -> None:
    x, _, others = operands(2, 5, 4, 2, 3, True)
    op = PackedAttentionGrad(0.3, 4, 2, True)
    np.testing.assert_allclose(decomposed(op, x, *others), run_op(op, x, *others), rtol=1e-10)


def test_refusals() -> None:
    others = ["float32[2,5,2,3]", "float32[2,2,5]", "float32[2,5,2,3]"]
    refused("width a multiple of", PackedAttentionGrad(1.0, 2, 2), "float32[2,5,17]", *others)
    refused("for queries .* must be", PackedAttentionGrad(1.0, 2, 2), "float32[2,5,24]", *others)
