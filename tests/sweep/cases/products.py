"""Drawn products and attention."""

from __future__ import annotations

from random import Random

from foreplan.graph import DType, TensorType
from foreplan.graph.types import Shape
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.ops.matmul import MatMul
from foreplan.ops.matmul_map import MatMulMap
from tests.sweep.case import Case, Given
from tests.sweep.draws import broadcastable, float_type, given, plain

POSITIONS = (1, 2, 5, 16, 17, 33, 64, 70, 131)  # several tiles of them, and parts of one
SIZES = (1, 1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 48)


def _matrices(rng: Random, most: int) -> tuple[Shape, Shape, Shape, bool, bool]:
    """Shapes of both factors and the product, and which factor is turned."""
    m, n, k = (rng.choice(SIZES) for _ in range(3))
    if rng.random() < 0.05:
        m, n, k = rng.choice([(0, n, k), (m, 0, k), (m, n, 0)])
    batch = tuple(rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 0, 0, 1, 1, 2, most])))
    first, second = rng.random() < 0.5, rng.random() < 0.5
    left, right = broadcastable(rng, batch), broadcastable(rng, batch)
    whole = (len(left) == len(batch) and left == batch) or (len(right) == len(batch) and right == batch)
    left = left if whole else batch
    a, b = ((k, m) if first else (m, k)), ((n, k) if second else (k, n))
    return (*left, *a), (*right, *b), (*batch, m, n), first, second


def matmul(rng: Random) -> Case:
    """Batches that broadcast, either side turned, added to something or not."""
    a, b, y, first, second = _matrices(rng, 4)
    op, dtype = MatMul(first, second, rng.random() < 0.3), float_type(rng)
    (result,) = op.infer([TensorType(dtype, a), TensorType(dtype, b)])
    base = [plain(rng, result.dtype, y)] * (rng.random() < 0.3)
    strange = ("tiny", "huge", "nonfinite")
    return Case(op, (given(rng, dtype, a, strange=strange), given(rng, dtype, b, strange=("tiny", "huge")), *base))


UPDATES = (
    (("relu((a0 + a1))",), 1),
    (("(a1 - (0.1 * a0))",), 1),
    (("a0", "(a0 * a1)"), 1),
    (("(a1 - (0.1 * ((0.9 * a2) + a0)))", "((0.9 * a2) + a0)"), 2),
    (("(a0 * sigmoid(a0))",), 0),
)


def matmul_map(rng: Random) -> Case:
    """Activations, residuals, updates; and biases of columns, which is all that cards have a kernel for."""
    a, b, y, first, second = _matrices(rng, 2)
    dtype = float_type(rng)
    if rng.random() < 0.5:
        return _biased(rng, dtype, a, b, y, first, second)
    exprs, further = rng.choice(UPDATES)
    others = [plain(rng, dtype, broadcastable(rng, y)) for _ in range(further)]
    return Case(MatMulMap(exprs, first, second), (plain(rng, dtype, a), plain(rng, dtype, b), *others))


def _biased(rng: Random, dtype: DType, a: Shape, b: Shape, y: Shape, first: bool, second: bool) -> Case:
    """The bias before or behind a residual, or alone; of the sums' type, sometimes."""
    kind = dtype if rng.random() < 0.7 else dtype.wide
    bias, residual = plain(rng, kind, y[-1:]), plain(rng, dtype, y)
    expr, others = rng.choice(
        [
            ("(a0 + a1)", [bias]),
            ("((a0 + a1) + a2)", [bias, residual]),
            ("(a1 + (a0 + a2))", [residual, bias]),
        ]
    )
    if kind != dtype:
        expr = f"{dtype}({expr})"
    return Case(MatMulMap((expr,), first, second), (plain(rng, dtype, a), plain(rng, dtype, b), *others))


def _attention(rng: Random, op: type, **more: bool):  # type: ignore[no-untyped-def]
    shared, group = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])
    batch, heads = rng.choice([1, 2]), shared * group
    queries, keys = rng.choice(POSITIONS), rng.choice(POSITIONS)
    depth = rng.choice([1, 2, 3, 8, 16])
    value_depth = depth if rng.random() < 0.7 else rng.choice([1, 4, 8])
    last = rng.random() < 0.5
    shapes = [(batch, heads, queries, depth), (batch, shared, keys, depth), (batch, shared, keys, value_depth)]
    shapes = [(s[0], s[2], s[1], s[3]) if last else s for s in shapes]
    dtype = float_type(rng)
    inputs = [plain(rng, dtype, shape) for shape in shapes]
    mask: list[Given] = []
    if rng.random() < 0.5:
        full = [batch, heads, queries, keys]
        extents = tuple(1 if rng.random() < 0.4 else n for n in full)
        kind = dtype if rng.random() < 0.7 else dtype.wide
        mask = [plain(rng, kind, extents, rng.choice(["normal", "infinite_below"]))]
    return op(rng.choice([0.5, 1.0, depth**-0.5]), rng.random() < 0.5, last, **more), inputs, mask


def attention(rng: Random) -> Case:
    """Shared heads, masks that broadcast, queries that see nothing."""
    op, inputs, mask = _attention(rng, Attention)
    return Case(op, (*inputs, *mask))


def attention_grad(rng: Random) -> Case:
    """From any output and log-sum-exp: the gradient is a formula of these."""
    op, inputs, mask = _attention(rng, AttentionGrad)
    op = AttentionGrad(op.scale, op.causal, op.heads_last, bool(mask) and rng.random() < 0.5)
    e = op.sizes([x.type for x in inputs])
    output = (*inputs[0].type.shape[:3], e.value_depth)
    dtype = inputs[0].type.dtype
    kept = [plain(rng, dtype, output), plain(rng, dtype.wide, e.log_sums.shape, "positive"), plain(rng, dtype, output)]
    return Case(op, (*inputs, *kept, *mask))


def packed_attention_grad(rng: Random) -> Case:
    """Queries, keys and values in one tensor."""
    shared, group, depth = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2]), rng.choice([1, 2, 8, 16])
    heads, batch, positions = shared * group, rng.choice([1, 2]), rng.choice(POSITIONS)
    op, dtype = PackedAttentionGrad(0.5, heads, shared, rng.random() < 0.5), float_type(rng)
    output = (batch, positions, heads, depth)
    x = plain(rng, dtype, (batch, positions, (heads + 2 * shared) * depth))
    lse = plain(rng, dtype.wide, (batch, heads, positions), "positive")
    return Case(op, (x, plain(rng, dtype, output), lse, plain(rng, dtype, output)))
