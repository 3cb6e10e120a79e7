"""Batch normalisation with the statistics of all ranks' batches, and its gradient.

Each rank exchanges two vectors of channels a layer and direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, TensorType, Value, register
from foreplan.graph.axes import Axes
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.ops.collective import AllGather, AllReduce
from foreplan.ops.expr import Arg, cast, rsqrt
from foreplan.ops.join import concat
from foreplan.ops.map import convert, elementwise, elementwise_many
from foreplan.ops.norm.batch import BatchNorm, BatchNormTrain, ChannelMoments, sum_gradients, with_flows_of_moments
from foreplan.ops.norm.channels import (
    ChannelTotals,
    channel_groups,
    other_axes,
    rows_of,
    share_of,
    vector_shape,
)
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape, slice_axis


@register
@dataclass(frozen=True)
class BatchNormSync(BatchNormTrain):
    """`BatchNormTrain` with the statistics of all ranks' x, as torch.nn.SyncBatchNorm has them. All ranks have batches
    of the same shape.

    Attributes:
        ranks: how many take part.
    """

    name: ClassVar[str] = "batch_norm_sync"
    ranks: int

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """From x and the two vectors. The sums over all ranks' batches are exchanged at once, and dx may take the bytes
        of the cotangent. With S = Σ g, T = Σ g · (x − mean) over all ranks, and M elements of a channel over all ranks,
        dx = scale · r · (g − S / M − (x − mean) · r² · T / M). Those of scale and bias are of this rank's sums.
        """
        (x, scale, bias), (_, mean, variance), (g, *of_moments) = inputs, outputs, cotangents
        dx = dscale = dbias = None
        sums: list[Value] = []
        if g is not None:
            sums += b.node(ChannelSums(), x, mean, g)
            if b.wants(scale):
                of = (sums[1], variance)
                dscale = elementwise(b, lambda t, v: t * rsqrt(v + self.epsilon), *of, dtype=scale.dtype)
            if b.wants(bias):
                dbias = convert(b, sums[0], bias.dtype)
        if not b.wants(x):
            return [None, dscale, dbias]
        totals = self.totals(b, [*sums, *(flow for flow in of_moments if flow is not None)])
        share = share_of(x) / self.ranks
        if g is not None:
            dx = self.pulled_back(b, x, (totals[0], totals[1], scale, variance), mean, g, share)
        further = iter(totals[len(sums) :])
        g_mean, g_variance = (None if flow is None else next(further) for flow in of_moments)
        return [with_flows_of_moments(b, dx, x, mean, g_mean, g_variance, share), dscale, dbias]

    def totals(self, b: Builder, vectors: Sequence[Value]) -> list[Value]:
        """The sums of all ranks' vectors of channels."""
        channels = vectors[0].type.size
        row = b.apply(AllReduce(self.ranks), concat(b, vectors), name="totals")
        return [slice_axis(b, row, 0, i * channels, channels) for i in range(len(vectors))]

    def pulled_back(self, b: Builder, x: Value, of: Sequence[Value], mean: Value, g: Value, share: float) -> Value:
        """The gradient of x from the cotangent of y; `of` are S, T, scale and variance."""
        wide = mean.dtype
        total, moment, scale, variance = (cast(Arg(i), wide) for i in range(len(of)))
        r = rsqrt(variance + self.epsilon)
        factor = scale * r
        vectors = elementwise_many(b, [-(moment * factor * r * r * share), -(total * factor * share), factor], *of)
        of_x = [reshape(b, vector, vector_shape(x)) for vector in (mean, *vectors)]
        return elementwise(b, lambda g, x, m, k, c, f: g * f + ((x - m) * k + c), g, x, *of_x, dtype=x.dtype)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """This rank's moments, those of all ranks, and y from what they are together.

        Means and variances of equal counts are merged as in Chan, Golub and LeVeque (1979): a large mean costs no
        digits.
        """
        x, scale, bias = inputs
        channels = x.shape[1]
        row = concat(b, b.node(ChannelMoments(), x))
        every = reshape(b, b.apply(AllGather(self.ranks), row), (self.ranks, 2, channels))
        means, variances = (reshape(b, slice_axis(b, every, 1, i, 1), (self.ranks, channels)) for i in range(2))
        mean = reduce(b, "mean", means, (0,))
        apart = elementwise(b, lambda v, m, whole: v + (m - whole) ** 2, variances, means, mean)
        variance = reduce(b, "mean", apart, (0,))
        (y,) = BatchNorm(self.epsilon).decompose(b, [x, scale, bias, mean, variance])
        return [y, mean, variance]


@register
@dataclass(frozen=True)
class ChannelSums(ChannelTotals):
    """Σ g and Σ g · (x − mean) of each channel.

    Inputs: x [N, C, *S], mean [C], g as x. Outputs: the two sums [C], wide if x is narrow.
    """

    name: ClassVar[str] = "channel_sums"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Two vectors."""
        self.check_count(inputs, 3)
        x, mean, g = inputs
        vector = self.check(x, mean)
        if g != x:
            raise ShapeError(f"the gradient must have the type of x, {x}, and is {g}")
        return (vector, vector)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Sums over all but the channels."""
        found = self.by_channels(inputs, outputs, is_whole=True)
        return replace(found, whole=frozenset(), sums=dict.fromkeys(found.whole, "sum"))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """A few channels at a time."""
        (x, mean, g), (total, moment) = inputs, outputs
        rows, grads = rows_of(x), rows_of(g)
        mean = mean.astype(total.dtype, copy=False)
        moment[...] = 0
        for at in channel_groups(rows.shape):
            sum_gradients(rows[:, at], grads[:, at], mean[at], total[at], moment[at], workspace)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Two reductions and a map."""
        x, mean, g = inputs
        axes, m = other_axes(x), reshape(b, mean, vector_shape(x))
        products = elementwise(b, lambda g, x, m: g * (x - m), g, x, m)
        return [reduce(b, "sum", g, axes, wide=True), reduce(b, "sum", products, axes, wide=True)]
