"""Attention on tensor cores and in float32, drawn at random: as near to exact results as rounded factors allow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.types import tensor_type
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.launch import USUAL, Arithmetic
from foreplan.runtime.cuda.table import OWN, OWN_TF32, kernels_for
from tests.gpu.check import run
from tests.gpu.compiled import needs_gcc
from tests.kernels import attention_operands, expected
from tests.profile import pick

pytestmark = needs_gcc
# How far a factor of a product may be from its exact value, relatively: half a unit of TensorFloat-32's ten bits of
# mantissa; of float32's, with what long sums and exponentials lose.
UNITS = {OWN_TF32: 2.0**-11, OWN: 2.0**-19}


@dataclass
class Exact:
    """Attention in float64, with heads before positions and each query head with its own keys; and how far from that
    results may be when every factor of a product is off by `unit` relatively."""

    op: Attention
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    unit: float

    def __post_init__(self) -> None:
        queries, keys = self.q.shape[2], self.k.shape[2]
        scores = self.op.scale * self.q @ self.k.swapaxes(2, 3) + self.mask
        if self.op.causal:
            scores = np.where(np.arange(keys) <= np.arange(queries)[:, None], scores, -np.inf)
        high = np.maximum(scores.max(-1, keepdims=True), -3e38)
        total = np.maximum(np.exp(scores - high).sum(-1, keepdims=True), 1.0)
        self.lse = (high + np.log(total))[..., 0]
        self.p = np.exp(scores - high) / total
        of_scores = 2 * self.unit * (abs(self.op.scale * self.q) @ abs(self.k).swapaxes(2, 3))
        self.of_scores = of_scores + self.unit * np.where(np.isfinite(scores), abs(scores), 0.0)
        self.of_p = self.p * np.expm1(self.of_scores + self.of_scores.max(-1, keepdims=True))
        self.o = self.p @ self.v

    def forward(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The output and the logarithms of sums, each with its bounds."""
        of_o = self.of_p @ abs(self.v) + 2 * self.unit * (self.p @ abs(self.v))
        return [(self.o, of_o), (self.lse, self.of_scores.max(-1) + self.unit * abs(self.lse))]

    def backward(self, g: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Gradients of q, k, v and scores, likewise."""
        unit, scale = self.unit, self.op.scale
        slopes = g @ self.v.swapaxes(2, 3) - (g * self.o).sum(-1, keepdims=True)
        of_slopes = 2 * unit * (abs(g) @ abs(self.v).swapaxes(2, 3) + (abs(g) * abs(self.o)).sum(-1, keepdims=True))
        ds, of_ds = self.p * slopes, self.of_p * (abs(slopes) + of_slopes) + self.p * of_slopes
        of_ds = of_ds + 2 * unit * abs(ds)
        down = [x.swapaxes(2, 3) for x in (ds, of_ds + 2 * unit * abs(ds), self.p, self.of_p + 2 * unit * self.p)]
        return [
            (scale * ds @ self.k, scale * (of_ds + 2 * unit * abs(ds)) @ abs(self.k)),
            (scale * down[0] @ self.q, scale * down[1] @ abs(self.q)),
            (down[2] @ g, down[3] @ abs(g)),
            (ds, of_ds),
        ]


def near(found: np.ndarray, exact: tuple[np.ndarray, np.ndarray]) -> None:
    wanted, bounds = exact
    assert found.shape == wanted.shape
    assert (abs(found - wanted) <= bounds + 1e-6 * (1 + abs(wanted))).all()


def summed(exact: tuple[np.ndarray, np.ndarray], group: int) -> tuple[np.ndarray, np.ndarray]:
    """Over the query heads that share a key head."""
    wanted, bounds = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in exact)
    return wanted, bounds


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("number", range(pick(2, 4, 100)))
def test_drawn_attention_is_near_exact_results(number: int, name: str) -> None:
    rng = np.random.default_rng(number)
    batch, shared, group = (int(x) for x in rng.integers(1, 3, 3))
    queries, keys = (int(x) for x in rng.integers(1, 150, 2))
    depth, value_depth = (int(x) for x in rng.integers(1, 80, 2))
    if number % 3 == 0:
        depth = value_depth = int(rng.choice([32, 64, 128]))
    sizes = (batch, shared * group, shared, queries, keys, depth, value_depth)
    op = Attention(depth**-0.5, bool(rng.integers(2)), bool(rng.integers(2)))
    q, k, v = (x.astype(np.float64) for x in attention_operands(rng, sizes))
    masked, shape = bool(rng.integers(2)), (batch, shared * group, queries, keys)
    mask = np.zeros((1, 1, 1, 1), np.float32)
    if masked:
        kept = tuple(int(n) if rng.integers(2) else 1 for n in shape)
        mask = np.where(rng.random(kept) < 0.2, -np.inf, rng.standard_normal(kept)).astype(np.float32)
    exact = Exact(op, q, *(x.repeat(group, 1) for x in (k, v)), mask.astype(np.float64), UNITS[name])

    def lying(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(1, 2) if op.heads_last else x, np.float32)

    def back(x: np.ndarray) -> np.ndarray:
        return x.swapaxes(1, 2) if op.heads_last else x

    given = [lying(q), lying(k), lying(v)]
    o, lse = run(op, [*given, *[mask] * masked], name=name)
    near(back(o), exact.forward()[0])
    near(lse, exact.forward()[1])
    g = rng.standard_normal(exact.o.shape)
    gradient = AttentionGrad(op.scale, op.causal, op.heads_last, masked and kept == shape)
    results = [lying(exact.o), exact.lse.astype(np.float32), lying(g)]
    dq, dk, dv, *of_mask = run(gradient, [*given, *results, *[mask] * masked], name=name)
    wanted = exact.backward(lying(g).swapaxes(1, 2).astype(np.float64) if op.heads_last else lying(g))
    near(back(dq), wanted[0])
    near(back(dk), summed(wanted[1], group))
    near(back(dv), summed(wanted[2], group))
    if of_mask:
        near(of_mask[0], wanted[3])


@pytest.mark.parametrize("causal", [False, True])
def test_packed_gradients_on_tensor_cores(causal: bool) -> None:
    op = PackedAttentionGrad(0.3, 4, 2, causal)
    x = np.random.default_rng(0).standard_normal((2, 70, 8 * 16)).astype(np.float32)
    o, lse = expected(Attention(0.3, causal, True), op.unpacked_arrays(x))
    given = (x, o, lse, np.ones_like(o))
    (found,), (wanted,) = run(op, given, name=OWN_TF32), expected(op, given)
    assert np.linalg.norm(found - wanted) <= 2e-3 * np.linalg.norm(wanted)


def test_only_who_allows_it_is_rounded() -> None:
    """With `tf32`, on cards that have it, of float32 and heads that are not too long."""
    for card, dtype, depth, how, offered in (
        ("h200", "float32", 64, Arithmetic(tf32=True), True),
        ("h200", "float32", 64, USUAL, False),
        ("t4", "float32", 64, Arithmetic(tf32=True), False),
        ("h200", "float16", 64, Arithmetic(tf32=True), False),
        ("h200", "float32", 400, Arithmetic(tf32=True), False),
    ):
        types = [tensor_type(f"{dtype}[1,2,64,{depth}]")] * 3
        op = Attention(0.1)
        windows = [[Window.dense(type) for type in found] for found in (types, op.infer(types))]
        kernels = kernels_for(op, *windows, device_named(card), how)
        assert OWN in kernels and (OWN_TF32 in kernels) == offered
        assert not offered or kernels[OWN_TF32].nanoseconds < kernels[OWN].nanoseconds
