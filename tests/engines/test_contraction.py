"""Matrix products of matrices that lie in any way, batched, and added to something."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.matmul import MatMul
from tests.engines.engine import Engine
from tests.kernels import normal
from tests.ops.check import type_of

NEAR = {"atol": 1e-4}
# Rows, columns and terms; long sums are taken in parts.
SIZES = [(1, 1, 1), (2, 3, 2), (3, 5, 7), (5, 33, 17), (64, 33, 17), (67, 64, 16), (130, 3, 31), (1, 40, 9), (40, 1, 9)]
SIZES += [(1, 1, 600), (5, 1, 600), (2, 7, 600)]
BATCHES = [
    ((3, 5, 7), (3, 7, 6)),
    ((2, 3, 4, 5), (2, 3, 5, 6)),
    ((4, 7, 5), (5, 6)),
    ((2, 3, 5, 7), (7, 6)),
    ((4, 7, 5), (1, 5, 6)),
    ((2, 3, 5, 7), (1, 1, 7, 6)),
    ((1, 4, 5), (3, 5, 2)),
    ((4, 5), (3, 5, 2)),
    ((2, 1, 5, 7), (3, 7, 6)),
    ((4, 1, 5, 7), (3, 7, 6)),
    ((1, 5, 7), (2, 1, 7, 6)),
]


@pytest.mark.bfloat16
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(engine: Engine, sizes: tuple[int, int, int], transpose_a: bool, transpose_b: bool) -> None:
    m, n, k = sizes
    a, b = normal(*((k, m) if transpose_a else (m, k))), normal(*((n, k) if transpose_b else (k, n)), seed=1)
    for wide in (False, True)[: 1 + engine.narrow]:
        op = MatMul(transpose_a, transpose_b, wide)
        engine.check(op, a, b, **NEAR)
        engine.check_over(op, [a, b, normal(m, n, seed=2)], None, (0, 2), **NEAR)


@pytest.mark.bfloat16
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("a", "b"), BATCHES, ids=str)
def test_batches(engine: Engine, a: tuple[int, ...], b: tuple[int, ...], turned: bool) -> None:
    op, whole = MatMul(turned), normal(*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1], seed=2)
    given = [normal(*a[:-2], *(a[:-3:-1] if turned else a[-2:])), normal(*b, seed=1)]
    engine.check(op, *given, **NEAR)
    engine.check_over(op, [*given, whole], None, (0, 2), **NEAR)


@pytest.mark.bfloat16
@pytest.mark.parametrize("shape", [(19, 4, 7), (4, 19, 7), (5, 3, 19, 7), (1, 4, 7)])
def test_sequences_first(engine: Engine, shape: tuple[int, ...]) -> None:
    """Leading axes that lie the other way round, and one matrix for all."""
    x, w = normal(*shape), normal(shape[-1], 6, seed=1)
    lying = Window.dense(type_of(np.moveaxis(x, 0, -2)))
    windows = [
        lying.viewed(shape, (lying.strides[-2], *lying.strides[:-2], lying.strides[-1])),
        Window.dense(type_of(w)),
    ]
    engine.check(MatMul(), x, w, windows=windows, **NEAR)
    added = normal(*shape[:-1], 6, seed=2)
    engine.check(MatMul(), x, w, added, windows=[*windows, Window.dense(type_of(added))], **NEAR)


@pytest.mark.bfloat16
@pytest.mark.parametrize("repeated", [(0,), (1,), (0, 1)])
def test_one_matrix_repeated_by_its_strides(engine: Engine, repeated: tuple[int, ...]) -> None:
    inputs = [normal(3, 4, 5), normal(3, 5, 6)]
    windows = [Window.dense(type_of(x)) for x in inputs]
    for i in repeated:
        inputs[i][:] = inputs[i][:1]
        windows[i] = windows[i].viewed(inputs[i].shape, (0, *windows[i].strides[1:]))
    engine.check(MatMul(), *inputs, windows=windows, **NEAR)


@pytest.mark.bfloat16
def test_heads_side_by_side(engine: Engine) -> None:
    """[batch, heads, rows, depth] of packed rows."""
    x, w = normal(2, 3, 9, 16), normal(2, 3, 16, 9)
    heads = Window(type_of(x), (9 * 48 * 4, 16 * 4, 48 * 4, 4))
    engine.check(MatMul(), x, w, windows=[heads, Window.dense(type_of(w))], **NEAR)
    engine.check(MatMul(False, True), x, x.copy(), windows=[heads, heads], **NEAR)


@pytest.mark.bfloat16
def test_rows_with_gaps_and_columns_side_by_side(engine: Engine) -> None:
    a, b, c = normal(5, 7), normal(7, 6), normal(5, 6)
    far, turned = Window(type_of(a), (9 * 4, 4)), Window(type_of(a), (4, 8 * 4))
    wide, apart = Window(type_of(b), (20 * 4, 4)), Window(type_of(c), (10 * 4, 4))
    engine.check(MatMul(), a, b, windows=[far, wide], **NEAR)
    engine.check(MatMul(), a, b, c, windows=[turned, wide, apart], **NEAR)
