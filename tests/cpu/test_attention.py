"""Attention and its gradients on the CPU engine against NumPy's: extents, masks, layouts, shared heads, bytes taken."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cpu.kernels import attention_cut
from tests.cpu.check import check_as_exact, expected, needs_onednn, type_of
from tests.engines.engine import Engine, in_both_types
from tests.engines.test_attention import NEAR, both, operands
from tests.kernels import attention_operands, normal

pytestmark = needs_onednn()
FORWARD, BACKWARD = NEAR["cpu"]

# batch, query heads, key heads, queries, keys, depth, value depth
SIZES = [(1, 2, 2, 300, 270, 8, 8), (1, 2, 1, 131, 260, 7, 9)]


@in_both_types("cpu")
@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_more_queries_than_a_block_has(engine: Engine, sizes: tuple[int, ...], causal: bool, heads_last: bool) -> None:
    both(engine, Attention(0.3, causal, heads_last), operands(sizes, heads_last))


@in_both_types("cpu")
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_few_queries(monkeypatch: pytest.MonkeyPatch, engine: Engine, causal: bool) -> None:
    """Many blocks, as long sequences have."""
    from foreplan.runtime.cpu.table import _make

    for name in ("QUERIES", "CAUSAL_QUERIES"):
        monkeypatch.setattr(attention_cut, name, 16)
    _make.cache_clear()
    for sizes in ((2, 3, 3, 61, 61, 8, 8), (1, 4, 2, 50, 75, 4, 6), (1, 2, 2, 75, 50, 4, 6)):
        both(engine, Attention(0.5, causal, True), operands(sizes, True))
    _make.cache_clear()


def test_large_scores_are_as_exact_as_numpys() -> None:
    draws = [attention_operands(np.random.default_rng(seed), (1, 2, 2, 40, 50, 8, 8)) for seed in range(10)]
    check_as_exact(Attention(30.0), draws, 1.5)
    gradients = [[*x, *expected(Attention(30.0), x), normal(1, 2, 40, 8, seed=i)] for i, x in enumerate(draws)]
    check_as_exact(AttentionGrad(30.0), gradients, 1.5)


@in_both_types("cpu")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2, 2, 270, 270, 8, 8), (1, 4, 2, 30, 30, 8, 8)], ids=str)
def test_results_take_the_bytes_of_all_operands_that_they_may(
    engine: Engine, sizes: tuple[int, ...], causal: bool
) -> None:
    inputs, op = operands(sizes, True), AttentionGrad(0.3, causal, True)
    engine.check(Attention(0.3, causal, True), *inputs, over=(0, 0), **FORWARD)
    o, lse = expected(Attention(0.3, causal, True), inputs)
    given = [*inputs, o, lse, normal(*o.shape)]
    engine.check_over(op, given, *op.overwrites([type_of(x) for x in given], [type_of(x) for x in inputs]), **BACKWARD)


@in_both_types("cpu")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("positions", [21, 270])
def test_packed_gradients_take_the_bytes_of_what_is_packed(
    engine: Engine, positions: int, shared: int, causal: bool
) -> None:
    op, x = PackedAttentionGrad(0.3, 4, shared, causal), normal(2, positions, (4 + 2 * shared) * 8)
    o, lse = expected(Attention(0.3, causal, True), op.unpacked_arrays(x))
    engine.check_over(op, [x, o, lse, normal(*o.shape)], None, (0, 0), **BACKWARD)
