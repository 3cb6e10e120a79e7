"""Attention and its gradients on the CPU engine against NumPy's: extents, masks, layouts, shared heads, bytes taken."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cpu.kernels import attention, attention_cut, attention_grad
from tests.cpu.check import check, expected, needs_onednn, run, type_of
from tests.kernels import attention_operands

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)
operands = partial(attention_operands, RNG)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}

# batch, query heads, key heads, queries, keys, depth, value depth
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 7, 5, 4, 6),
    (1, 4, 4, 33, 47, 8, 3),
    (2, 4, 2, 19, 19, 5, 5),
    (1, 6, 1, 5, 40, 16, 16),
    (1, 2, 2, 300, 270, 8, 8),
    (1, 2, 1, 131, 260, 7, 9),
]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def both(scale: float, causal: bool, heads_last: bool, inputs: list[np.ndarray], *mask: np.ndarray) -> None:
    """Check forward and backward."""
    forward = Attention(scale, causal, heads_last)
    check(forward, *inputs, *mask, **TOLERANCE)
    o, lse = expected(forward, [*inputs, *mask])
    check(AttentionGrad(scale, causal, heads_last), *inputs, o, lse, normal(*o.shape), *mask, **TOLERANCE)


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_and_its_gradient(sizes: tuple[int, ...], causal: bool, heads_last: bool) -> None:
    both(0.3, causal, heads_last, operands(sizes, heads_last))


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_few_queries(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """Many blocks, as long sequences have."""
    from foreplan.runtime.cpu.table import _make

    for name in ("QUERIES", "CAUSAL_QUERIES"):
        monkeypatch.setattr(attention_cut, name, 16)
    _make.cache_clear()
    for sizes in ((2, 3, 3, 61, 61, 8, 8), (1, 4, 2, 50, 75, 4, 6), (1, 2, 2, 75, 50, 4, 6)):
        both(0.5, causal, True, operands(sizes, True))
    _make.cache_clear()


MASKS = [(2, 4, 21, 30), (2, 1, 1, 30), (1, 1, 21, 30), (1, 4, 1, 1), (1, 4, 21, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_and_their_gradients(shape: tuple[int, ...], heads: int, causal: bool) -> None:
    inputs, mask = operands((2, 4, heads, 21, 30, 8, 5)), normal(*shape)
    both(0.3, causal, False, inputs, mask)
    o, lse = expected(Attention(0.3, causal), [*inputs, mask])
    op = AttentionGrad(0.3, causal, mask_gradient=True)
    check(op, *inputs, o, lse, normal(*o.shape), mask, rtol=2e-5, atol=1e-4)


def test_a_mask_whose_keys_lie_apart() -> None:
    inputs, mask = operands((1, 2, 2, 9, 12, 4, 4)), normal(1, 2, 9, 12)
    windows = [Window.dense(type_of(x)) for x in inputs]
    windows.append(Window(type_of(mask), (9 * 12 * 2 * 4, 9 * 12 * 4, 4, 9 * 4)))
    check(Attention(0.3), *inputs, mask, windows=windows, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_may_read_no_key_give_zeros(causal: bool) -> None:
    inputs, mask = operands((1, 2, 2, 9, 12, 4, 4)), np.zeros((1, 1, 9, 12), np.float32)
    mask[0, 0, 3] = -np.inf
    mask[0, 0, 5, :2] = -np.inf
    both(0.3, causal, False, inputs, mask)
    o, lse = run(Attention(0.3, causal), [*inputs, mask])
    assert not o[0, :, 3].any() and np.isfinite(lse).all()


def test_what_is_not_a_number_shows() -> None:
    q, k, v = operands((1, 1, 1, 6, 40, 4, 4))
    q[0, 0, 2, 1] = np.nan
    o, lse = run(Attention(0.3), [q, k, v])
    assert np.isnan(o[0, 0, 2]).all() and np.isnan(lse[0, 0, 2])
    assert np.isfinite(np.delete(o[0, 0], 2, axis=0)).all()


def test_large_scores_are_as_exact_as_numpys() -> None:
    """Beside what float64 gives, over ten draws: of one, either may be thrice as far off."""
    draws = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        inputs = attention_operands(rng, (1, 2, 2, 40, 50, 8, 8))
        o, lse = expected(Attention(30.0), inputs)
        g = rng.standard_normal(o.shape).astype(np.float32)
        errors = []
        for op, given in ((Attention(30.0), inputs), (AttentionGrad(30.0), [*inputs, o, lse, g])):
            exact = expected(op, [x.astype(np.float64) for x in given])
            results = zip(run(op, given), expected(op, given), exact, strict=True)
            errors += [(ours - true, theirs - true) for ours, theirs, true in results]
        draws.append(errors)
    for pairs in zip(*draws, strict=True):
        ours, theirs = (np.abs(each) for each in zip(*pairs))
        assert ours.max() <= 2 * theirs.max() + 1e-6
        assert np.linalg.norm(ours) <= 1.5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 4, 4, 21, 21, 8, 8), (1, 2, 2, 270, 270, 8, 8), (1, 4, 2, 30, 30, 8, 8)], ids=str
)
def test_results_take_the_bytes_of_operands(sizes: tuple[int, ...], causal: bool) -> None:
    inputs = operands(sizes, True)
    check(Attention(0.3, causal, True), *inputs, over=(0, 0), **TOLERANCE)
    o, lse = expected(Attention(0.3, causal, True), inputs)
    g, op = normal(*o.shape), AttentionGrad(0.3, causal, True)
    pairs = op.overwrites([type_of(x) for x in (*inputs, o, lse, g)], [type_of(x) for x in inputs])
    for pair in pairs:
        check(op, *inputs, o, lse, g, over=pair, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("positions", [21, 270])
def test_packed_queries_keys_and_values(positions: int, shared: int, causal: bool) -> None:
    op = PackedAttentionGrad(0.3, 4, shared, causal)
    x = normal(2, positions, (4 + 2 * shared) * 8)
    o, lse = expected(Attention(0.3, causal, True), op.unpacked_arrays(x))
    g = normal(*o.shape)
    check(op, x, o, lse, g, **TOLERANCE)
    check(op, x, o, lse, g, over=(0, 0), **TOLERANCE)


def test_parts_of_several_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = operands((2, 3, 3, 70, 70, 8, 8), True)
    o, lse = expected(Attention(0.3, True, True), inputs)
    for op, given in (
        (Attention(0.3, True, True), inputs),
        (AttentionGrad(0.3, True, True), [*inputs, o, lse, normal(*o.shape)]),
    ):
        alone = run(op, given)
        for module in (attention, attention_grad):
            monkeypatch.setattr(module, "GRAIN", 700)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, run(op, given, threads=3), strict=True))
