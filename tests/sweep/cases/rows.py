"""Drawn reductions, row operations, normalisations and losses."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from foreplan.graph import TensorType, as_dtype
from foreplan.graph.types import Shape
from foreplan.ops.bits import BYTE
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy, CrossEntropyGrad
from foreplan.ops.norm.batch import BatchNorm, BatchNormGrad, BatchNormTrain, ChannelMoments
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from foreplan.ops.norm.sync import BatchNormSync, ChannelSums
from foreplan.ops.reduce import Reduce
from foreplan.ops.scan import CumSum
from foreplan.ops.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad
from foreplan.ops.sort import ArgReduce, TopK
from tests.sweep.case import Case, Given
from tests.sweep.draws import INDEX_TYPES, any_axis, any_type, extent, float_type, given, layout, plain, shape


def reduce(rng: Random) -> Case:
    """Any axes, none and all of them; of nothing where that has a result."""
    how = rng.choice(["sum", "mean", "prod", "max", "min"])
    extents = shape(rng, 1, 5, empty=how in ("sum", "prod"))
    if rng.random() < 0.12:  # which are taken in parts
        extents = rng.choice([(20011,), (2, 18000), (18000, 3), (3, 9001, 2)])
    axes = tuple(sorted(rng.sample(range(len(extents)), rng.randint(1, len(extents)))))
    dtype = float_type(rng) if how == "mean" or rng.random() < 0.7 else any_type(rng)
    strange = ("tiny", "nonfinite") if how == "prod" else ("tiny", "huge", "nonfinite", "mixed")
    return Case(
        Reduce(how, axes, rng.random() < 0.5, rng.random() < 0.3), (given(rng, dtype, extents, strange=strange),)
    )


def cumsum(rng: Random) -> Case:
    """Along any axis, either way."""
    extents, dtype = shape(rng, 1, 5), any_type(rng)
    while dtype.category == "bool":
        dtype = any_type(rng)
    op = CumSum(any_axis(rng, extents), rng.random() < 0.5, rng.random() < 0.5)
    return Case(op, (given(rng, dtype, extents, strange=("tiny", "huge", "nonfinite")),))


def arg_reduce(rng: Random) -> Case:
    """Positions of extremes, ties and NaN among them."""
    extents = shape(rng, 1, 5, empty=False)
    op = ArgReduce(rng.choice(["max", "min"]), any_axis(rng, extents), rng.random() < 0.5, rng.random() < 0.5)
    return Case(op, (given(rng, any_type(rng), extents),))


def top_k(rng: Random) -> Case:
    """None, some, or all in order. What order NaN takes is open."""
    extents = shape(rng, 1, 4)
    axis = any_axis(rng, extents)
    op = TopK(rng.randint(0, extents[axis]), axis, rng.random() < 0.5)
    return Case(op, (given(rng, any_type(rng), extents, strange=("tiny", "huge", "infinite_below")),))


def _row(op: type, inputs: int):  # type: ignore[no-untyped-def]
    def draw(rng: Random) -> Case:
        extents, dtype = shape(rng, 1, 4), float_type(rng)
        axis = any_axis(rng, extents)
        if not extents[axis]:
            extents = (*extents[:axis], 1, *extents[axis + 1 :])
        if inputs == 1:
            return Case(op(axis), (given(rng, dtype, extents, strange=("tiny", "huge", "infinite_below")),))
        # A result, whose exponential is finite, and its cotangent.
        result = plain(rng, dtype, extents, rng.choice(["normal", "ties", "positive"]))
        return Case(op(axis), (result, given(rng, dtype, extents, strange=("tiny",))))

    return draw


softmax, softmax_grad = _row(Softmax, 1), _row(SoftmaxGrad, 2)
log_softmax = _row(LogSoftmax, 1)


def log_softmax_grad(rng: Random) -> Case:
    """From logarithms of probabilities."""
    case = _row(LogSoftmaxGrad, 2)(rng)
    y, g = case.inputs
    return replace(case, inputs=(replace(y, values=rng.choice(["logarithms", "logarithms", "tiny"])), g))


def _rows(rng: Random) -> tuple[Shape, int]:
    extents = shape(rng, 1, 4, empty=False)
    return extents, any_axis(rng, extents)


def _row_norm(op: type, most: int):  # type: ignore[no-untyped-def]
    def draw(rng: Random) -> Case:
        (extents, axis), dtype = _rows(rng), float_type(rng)
        kind = dtype.wide if rng.random() < 0.4 else dtype
        parameters = [plain(rng, kind, extents[axis:]) for _ in range(rng.randint(0, most))]
        x = given(rng, dtype, extents, strange=("tiny",))
        return Case(op(axis, rng.choice([1e-5, 1e-3])), (x, *parameters))

    return draw


layer_norm, rms_norm = _row_norm(LayerNorm, 2), _row_norm(RMSNorm, 1)


def _row_norm_grad(op: type, statistics: int):  # type: ignore[no-untyped-def]
    def draw(rng: Random) -> Case:
        (extents, axis), dtype, scaled = _rows(rng), float_type(rng), rng.random() < 0.6
        kind = dtype.wide if rng.random() < 0.4 else dtype
        vectors = [plain(rng, kind, extents[axis:])] * scaled
        means = [plain(rng, dtype.wide, extents[:axis])] * (statistics - 1)
        deviations = plain(rng, dtype.wide, extents[:axis], "positive")
        added = [plain(rng, dtype, extents)] * (rng.random() < 0.3)
        x, g = plain(rng, dtype, extents), plain(rng, dtype, extents)
        return Case(op(axis, scaled), (x, *vectors, *means, deviations, g, *added))

    return draw


layer_norm_grad, rms_norm_grad = _row_norm_grad(LayerNormGrad, 2), _row_norm_grad(RMSNormGrad, 1)


def _images(rng: Random) -> Shape:
    """With few positions; or with so many that they are gone over in parts."""
    if rng.random() < 0.15:
        return (rng.choice([1, 2]), rng.choice([1, 3, 8]), rng.choice([1031, 2048, 4100, 9001]))
    return (
        rng.choice([1, 2, 3, 5]),
        rng.choice([1, 2, 3, 8, 16, 17]),
        *(extent(rng, 8) for _ in range(rng.randint(0, 3))),
    )


def _channel_norm(op, values: tuple[str, ...], images: int, *attributes: float):  # type: ignore[no-untyped-def]
    """Images, vectors of these values, and further images."""

    def draw(rng: Random) -> Case:
        extents, dtype = _images(rng), float_type(rng)
        kind = dtype.wide if rng.random() < 0.6 else dtype
        vectors = [plain(rng, kind, extents[1:2], value) for value in values]
        x = given(rng, dtype, extents, strange=("tiny",))
        return Case(op(*attributes), (x, *vectors, *(plain(rng, dtype, extents) for _ in range(images))))

    return draw


batch_norm = _channel_norm(BatchNorm, ("normal", "normal", "normal", "positive"), 0, 1e-5)
batch_norm_train = _channel_norm(BatchNormTrain, ("normal", "normal"), 0, 1e-3)
batch_norm_grad = _channel_norm(BatchNormGrad, ("normal", "normal", "positive"), 1, 1e-5)
channel_moments = _channel_norm(ChannelMoments, (), 0)
channel_sums = _channel_norm(ChannelSums, ("normal",), 1)
batch_norm_sync = _channel_norm(BatchNormSync, ("normal", "normal"), 0, 1e-3, 1)  # of one rank


def masked_batch_norm_grad(rng: Random) -> Case:
    """Of images whose elements come in eights."""
    extents, dtype = _images(rng), float_type(rng)
    extents = (*extents[:1], 8 * extents[1], *extents[2:])
    expr, count = rng.choice([("where(a0, a1, 0.0)", 1), ("where(a0, (a1 + a2), 0.0)", 2)])
    kind = dtype.wide if rng.random() < 0.6 else dtype
    vectors = [plain(rng, kind, extents[1:2], value) for value in ("normal", "normal", "positive")]
    bits = Given(TensorType(BYTE, (math.prod(extents) // 8,)), "bits", rng.getrandbits(16))
    gradients = [plain(rng, dtype, extents) for _ in range(count)]
    return Case(
        MaskedBatchNormGrad(1e-5, expr, rng.random() < 0.5), (plain(rng, dtype, extents), *vectors, bits, *gradients)
    )


def _targets(rng: Random, extents: Shape, classes: int) -> Given:
    high = min(classes, 127)
    low = rng.choice([0, 0, -1])
    dtype = as_dtype(rng.choice([name for name in INDEX_TYPES if low == 0 or not name.startswith("u")]))
    return Given(TensorType(dtype, extents), f"{low}:{high}", rng.getrandbits(16), layout(rng, len(extents)))


def _classes(rng: Random) -> tuple[Shape, int]:
    extents = shape(rng, 1, 4)
    axis = any_axis(rng, extents)
    if not extents[axis]:
        extents = (*extents[:axis], 3, *extents[axis + 1 :])
    return extents, axis


def cross_entropy(rng: Random) -> Case:
    """Targets that are ignored among them; -1 is ignored or wrong."""
    extents, axis = _classes(rng)
    items = (*extents[:axis], *extents[axis + 1 :])
    logits = given(rng, float_type(rng), extents, strange=("tiny", "infinite_below"))
    return Case(CrossEntropy(axis, rng.choice([-100, -1, 0, 2])), (logits, _targets(rng, items, extents[axis])))


def cross_entropy_grad(rng: Random) -> Case:
    """From any log-sum-exp that is no less than the logits by much."""
    extents, axis = _classes(rng)
    dtype, items = float_type(rng), (*extents[:axis], *extents[axis + 1 :])
    numbers = [plain(rng, dtype.wide, items, values) for values in ("positive", "normal")]
    op = CrossEntropyGrad(axis, rng.choice([-100, -1, 0, 2]))
    return Case(op, (plain(rng, dtype, extents), _targets(rng, items, extents[axis]), *numbers))


def linear_cross_entropy(rng: Random) -> Case:
    """In chunks, the last one short."""
    rows, depth, classes = rng.choice([1, 2, 5, 7, 16, 33]), extent(rng), rng.choice([1, 2, 3, 8, 17, 40])
    dtype = float_type(rng)
    bias = [plain(rng, dtype.wide if rng.random() < 0.4 else dtype, (classes,))] * (rng.random() < 0.4)
    op = LinearCrossEntropy(
        rng.choice([1, 3, 8, 256]),
        rng.choice([-100, -1, 0]),
        rng.random() < 0.7,
        rng.random() < 0.4,
        rng.random() < 0.3,
    )
    target = _targets(rng, (rows,), classes)
    return Case(op, (plain(rng, dtype, (rows, depth)), plain(rng, dtype, (classes, depth)), target, *bias))
