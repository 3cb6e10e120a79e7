"""Attention and its gradients on the CPU engine against NumPy's: extents, masks, layouts, shared heads, bytes taken."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cpu.kernels import attention, attention_cut, attention_grad
from tests.cpu.check import check, check_as_exact, expected, needs_onednn, run, type_of
from tests.engines.engine import ENGINES
from tests.engines.test_attention import both, operands
from tests.kernels import attention_operands, normal

pytestmark = needs_onednn()
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}

# batch, query heads, key heads, queries, keys, depth, value depth
SIZES = [(1, 2, 2, 300, 270, 8, 8), (1, 2, 1, 131, 260, 7, 9)]


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_more_queries_than_a_block_has(sizes: tuple[int, ...], causal: bool, heads_last: bool) -> None:
    both(ENGINES["cpu"], Attention(0.3, causal, heads_last), operands(sizes, heads_last))


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_few_queries(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """Many blocks, as long sequences have."""
    from foreplan.runtime.cpu.table import _make

    for name in ("QUERIES", "CAUSAL_QUERIES"):
        monkeypatch.setattr(attention_cut, name, 16)
    _make.cache_clear()
    for sizes in ((2, 3, 3, 61, 61, 8, 8), (1, 4, 2, 50, 75, 4, 6), (1, 2, 2, 75, 50, 4, 6)):
        both(ENGINES["cpu"], Attention(0.5, causal, True), operands(sizes, True))
    _make.cache_clear()


def test_large_scores_are_as_exact_as_numpys() -> None:
    draws = [attention_operands(np.random.default_rng(seed), (1, 2, 2, 40, 50, 8, 8)) for seed in range(10)]
    check_as_exact(Attention(30.0), draws, 1.5)
    gradients = [[*x, *expected(Attention(30.0), x), normal(1, 2, 40, 8, seed=i)] for i, x in enumerate(draws)]
    check_as_exact(AttentionGrad(30.0), gradients, 1.5)


@pytest.mark.parametrize("causal", [False, True])
def test_results_of_several_blocks_take_the_bytes_of_operands(causal: bool) -> None:
    inputs = operands((1, 2, 2, 270, 270, 8, 8), True)
    check(Attention(0.3, causal, True), *inputs, over=(0, 0), **TOLERANCE)
    o, lse = expected(Attention(0.3, causal, True), inputs)
    given, op = (*inputs, o, lse, normal(*o.shape)), AttentionGrad(0.3, causal, True)
    for pair in op.overwrites([type_of(x) for x in given], [type_of(x) for x in inputs]):
        check(op, *given, over=pair, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [4, 2])
def test_packed_queries_keys_and_values_of_several_blocks(shared: int, causal: bool) -> None:
    op, x = PackedAttentionGrad(0.3, 4, shared, causal), normal(2, 270, (4 + 2 * shared) * 8)
    o, lse = expected(Attention(0.3, causal, True), op.unpacked_arrays(x))
    for over in (None, (0, 0)):
        check(op, x, o, lse, normal(*o.shape), over=over, **TOLERANCE)


def test_parts_of_several_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, forward = operands((2, 3, 3, 70, 70, 8, 8), True), Attention(0.3, True, True)
    o, lse = expected(forward, inputs)
    for op, given in ((forward, inputs), (AttentionGrad(0.3, True, True), [*inputs, o, lse, normal(*o.shape)])):
        alone = run(op, given)
        for module in (attention, attention_grad):
            monkeypatch.setattr(module, "GRAIN", 700)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, run(op, given, threads=3), strict=True))
