"""Batch normalisation (Ioffe and Szegedy 2015) in inference and training, and its gradient.

The kernels work on a few channels at a time, so that a channel is still in the cache for its second read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Graph, Kind, Node, TensorType, Value, as_dtype, register
from foreplan.graph.axes import Axes
from foreplan.graph.op import Arrays, Cotangents, Training, Types, Values, only
from foreplan.ops.expr import rsqrt, sqrt
from foreplan.ops.map import convert, elementwise
from foreplan.ops.norm.channels import (
    ChannelNorm,
    ChannelTotals,
    all_blocks,
    block_bytes,
    blocks_of,
    channel_groups,
    other_axes,
    rows_of,
    scratch_of,
    share_of,
    vector_shape,
)
from foreplan.ops.pullback import by_parts
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape


@register
@dataclass(frozen=True)
class BatchNorm(ChannelNorm):
    """y = (x − mean) · scale / sqrt(variance + epsilon) + bias with statistics that are given, an entry a channel.

    Inputs: x [N, C, *S], scale, bias, mean, variance, all [C]. Output: y as x.

    Attributes:
        momentum: share of the old statistics that an update keeps in training, as ONNX has it.
        frozen: whether training uses the statistics that are given, too, and keeps them.
        unbiased: whether the variance that is kept is that of the population, as PyTorch has it: n / (n - 1) times that
            of the batch's n elements of a channel. ONNX keeps the batch's own.
    """

    name: ClassVar[str] = "batch_norm"
    narrow: ClassVar[int] = 1
    momentum: float = 0.9
    frozen: bool = False
    unbiased: bool = False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of x."""
        self.check_count(inputs, 5)
        self.check(*inputs)
        return (inputs[0],)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Every element by itself."""
        return self.by_channels(inputs, outputs, is_whole=False)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """With the statistics as given numbers."""
        (x, scale, bias, mean, variance), g = inputs, only(cotangents)
        shape, axes = vector_shape(x), other_axes(x)
        dx = dscale = dbias = dmean = dvariance = None
        if any(b.wants(value) for value in (x, scale, mean, variance)):
            r = elementwise(b, lambda v: rsqrt(v + self.epsilon), variance)
        if b.wants(scale) or b.wants(variance):
            moments = elementwise(b, lambda g, x, m: g * (x - m), g, x, reshape(b, mean, shape), dtype=x.dtype)
            moment = reduce(b, "sum", moments, axes, wide=True)
            if b.wants(scale):
                dscale = elementwise(b, lambda s, r: s * r, moment, r, dtype=scale.dtype)
            if b.wants(variance):
                of = (moment, scale, r)
                dvariance = elementwise(b, lambda t, s, r: -0.5 * t * s * r * r * r, *of, dtype=variance.dtype)
        if b.wants(bias) or b.wants(mean):
            total = reduce(b, "sum", g, axes, wide=True)
            dbias = convert(b, total, bias.dtype) if b.wants(bias) else None
            if b.wants(mean):
                dmean = elementwise(b, lambda t, s, r: -(t * s * r), total, scale, r, dtype=mean.dtype)
        if b.wants(x):
            factor = reshape(b, elementwise(b, lambda s, r: s * r, scale, r), shape)
            dx = elementwise(b, lambda g, f: g * f, g, factor, dtype=x.dtype)
        return [dx, dscale, dbias, dmean, dvariance]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """y may take the bytes of x."""
        return ((0, 0),)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """A subtraction, a product and an addition an element."""
        return 3 * outputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block that is rounded at the end, if x is narrow."""
        return block_bytes(inputs[0]) if inputs[0].dtype.is_narrow else 0

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Block by block."""
        x, wide = inputs[0], as_dtype(inputs[0].dtype).wide.numpy
        scale, bias, mean, variance = (vector.astype(wide, copy=False) for vector in inputs[1:])
        factor = _factor(scale, variance, self.epsilon)
        rows, y = rows_of(x), rows_of(outputs[0])
        for items, channels, positions in all_blocks(rows.shape):
            target = y[items, channels, positions]
            block = scratch_of(workspace, target)[0] if workspace.size else target
            np.subtract(rows[items, channels, positions], mean[channels, None], out=block)
            block *= factor[channels, None]
            block += bias[channels, None]
            if block is not target:
                np.copyto(target, block, casting="unsafe")

    def for_training(self, b: Builder, inputs: Values, training: Training) -> Values | None:
        """With the batch's own statistics, which the running ones follow; None if frozen."""
        if self.frozen:
            return None
        x, scale, bias, *running = inputs
        y, *batch = b.node(BatchNormTrain(self.epsilon), x, scale, bias)
        keep, count = self.momentum, training.ranks * (x.type.size // max(1, x.shape[1]))
        spread = count / max(1, count - 1) if self.unbiased else 1.0

        def follow(old: Value, new: Value, share: float) -> Value:
            return elementwise(b, lambda o, n: o * keep + n * share, old, new, dtype=old.dtype)

        for old, new, factor in zip(running, batch, (1.0, spread)):
            if old.kind is Kind.BUFFER:
                # What it will be may follow from another use of the same layer.
                training.update(old, follow(training.next_content(old), new, (1 - keep) * factor))
        return [y]

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """One map over the channels and one over the elements."""
        x, *others = inputs
        vectors = self.vectors(b, others, len(x.shape))
        return [elementwise(b, lambda x, m, f, c: (x - m) * f + c, x, *vectors, dtype=x.dtype)]

    def vectors(self, b: Builder, others: Sequence[Value], rank: int) -> list[Value]:
        """Mean, factor and bias of scale, bias, mean and variance, to go with images of `rank` axes."""
        scale, bias, mean, variance = others
        factor = elementwise(b, lambda s, v: s / sqrt(v + self.epsilon), scale, variance)
        return [reshape(b, vector, (-1, *[1] * (rank - 2))) for vector in (mean, factor, bias)]


@register
@dataclass(frozen=True)
class BatchNormTrain(ChannelNorm):
    """Batch normalisation with the statistics of x itself over all axes but the channels.

    Inputs: x [N, C, *S], scale and bias [C]. Outputs: y as x, mean and (population) variance [C], wide if x is narrow.
    `BatchNorm` of x with these statistics gives the same y, bit for bit. Composite: `ChannelMoments` and a map.
    """

    name: ClassVar[str] = "batch_norm_train"
    narrow: ClassVar[int] = 1

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of x, and two vectors."""
        self.check_count(inputs, 3)
        vector = self.check(*inputs)
        return (inputs[0], vector, vector)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """From x and the two vectors; those are differentiable, too."""
        (x, scale, _), (_, mean, variance), (g, g_mean, g_variance) = inputs, outputs, cotangents
        gradients: list[Value | None] = [None, None, None]
        if g is not None:
            found = b.node(BatchNormGrad(self.epsilon), x, scale, mean, variance, g)
            gradients = [found[0], *(convert(b, vector, scale.dtype) for vector in found[1:])]
        if b.wants(x):
            gradients[0] = with_flows_of_moments(b, gradients[0], x, mean, g_mean, g_variance, share_of(x))
        return gradients

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """The statistics, and y from them, so that recomputing y does not recompute the statistics."""
        x, scale, bias = inputs
        mean, variance = b.node(ChannelMoments(), x)
        (y,) = BatchNorm(self.epsilon).decompose(b, [x, scale, bias, mean, variance])
        return [y, mean, variance]


@register
@dataclass(frozen=True)
class ChannelMoments(ChannelTotals):
    """Mean and (population) variance of each channel.

    Inputs: x [N, C, *S]. Outputs: mean and variance [C], wide if x is narrow.
    """

    name: ClassVar[str] = "channel_moments"
    narrow: ClassVar[int] = 1

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Two vectors."""
        self.check_count(inputs, 1)
        vector = self.check(*inputs)
        return (vector, vector)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Two passes, a few channels at a time."""
        (x,), (mean, variance) = inputs, outputs
        rows = rows_of(x)
        count = rows.shape[0] * rows.shape[2]
        for channels in channel_groups(rows.shape):
            here, m, v = rows[:, channels], mean[channels], variance[channels]
            np.add.reduce(here, axis=(0, 2), out=m, dtype=m.dtype)
            m /= count
            v[...] = 0
            for items, positions in blocks_of(here.shape):
                block = here[items, :, positions]
                centred, sums = scratch_of(workspace, block)
                np.subtract(block, m[:, None], out=centred)
                v += np.sum(np.vecdot(centred, centred, out=sums), axis=0)
            v /= count

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Two reductions and a map."""
        (x,) = inputs
        axes = other_axes(x)
        mean = reduce(b, "mean", x, axes, wide=True)
        squares = elementwise(b, lambda x, m: (x - m) ** 2, x, reshape(b, mean, vector_shape(x)))
        return [mean, reduce(b, "mean", squares, axes)]


@register
@dataclass(frozen=True)
class BatchNormGrad(ChannelNorm):
    """Gradients of `BatchNormTrain`: with x̂ = (x − mean) · r, r = 1 / sqrt(variance + epsilon) and M = N · |S|,
    dbias = Σ g, dscale = Σ g · x̂, dx = scale · r · (g − dbias / M − x̂ · dscale / M).

    Inputs: x [N, C, *S], scale, mean, variance [C], g as x. Outputs: dx as x, dscale, dbias [C], wide if x is narrow.
    """

    name: ClassVar[str] = "batch_norm_grad"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of x, and two vectors."""
        self.check_count(inputs, 5)
        x, *vectors, g = inputs
        vector = self.check(x, *vectors)
        if g != x:
            raise ShapeError(f"the gradient must have the type of x, {x}, and is {g}")
        return (x, vector, vector)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Of the parts."""
        return by_parts(self, b, inputs, cotangents)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """dx may take the bytes of g or of x: a channel's sums are done before its first element is written."""
        return ((0, 4), (0, 0))

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Sum 1, centring 1, product with g 2, and 4 for dx, an element."""
        return 8 * inputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A block of differences from the mean, and a partial sum an item and channel of it."""
        return block_bytes(inputs[0])

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One pass for the sums and one for the elements, a few channels at a time."""
        (x, *vectors, g), (dx, dscale, dbias) = inputs, outputs
        scale, mean, variance = (vector.astype(dscale.dtype, copy=False) for vector in vectors)
        rows, grads, result = rows_of(x), rows_of(g), rows_of(dx)
        count = rows.shape[0] * rows.shape[2]
        for channels in channel_groups(rows.shape):
            here, there, m = rows[:, channels], grads[:, channels], mean[channels]
            r = 1 / np.sqrt(variance[channels] + dscale.dtype.type(self.epsilon))
            moment = np.zeros_like(r)
            sum_gradients(here, there, m, dbias[channels], moment, workspace)
            np.multiply(moment, r, out=dscale[channels])
            slope, shift, factor = moment * r * r / count, dbias[channels] / count, scale[channels] * r
            for items, positions in blocks_of(here.shape):
                block = here[items, :, positions]
                centred, _ = scratch_of(workspace, block)
                np.subtract(block, m[:, None], out=centred)
                centred *= slope[:, None]
                centred += shift[:, None]
                target = result[items, channels, positions]
                block = centred if target.dtype != centred.dtype else target
                np.subtract(there[items, :, positions], centred, out=block)
                np.multiply(block, factor[:, None], out=target, casting="same_kind")

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Two reductions and maps."""
        x, scale, mean, variance, g = inputs
        shape, axes = vector_shape(x), other_axes(x)
        m = reshape(b, mean, shape)
        r = elementwise(b, lambda v: rsqrt(v + self.epsilon), variance)
        dbias = reduce(b, "sum", g, axes, wide=True)
        moment = reduce(b, "sum", elementwise(b, lambda g, x, m: g * (x - m), g, x, m), axes, wide=True)
        share = share_of(x)
        slope = elementwise(b, lambda t, r: t * r * r * share, moment, r)
        vectors = [reshape(b, vector, shape) for vector in (dbias, slope, elementwise(b, lambda s, r: s * r, scale, r))]
        of = (g, x, m, *vectors)
        dx = elementwise(b, lambda g, x, m, s, k, f: (g - s * share - (x - m) * k) * f, *of, dtype=x.dtype)
        return [dx, elementwise(b, lambda t, r: t * r, moment, r), dbias]


def with_flows_of_moments(
    b: Builder,
    dx: Value | None,
    x: Value,
    mean: Value,
    g_mean: Value | None,
    g_variance: Value | None,
    share: float,
) -> Value | None:
    """The gradient of x, with what comes from those of mean and variance; `share` is one element's weight in them."""
    shape, flows = vector_shape(x), [] if dx is None else [dx]
    if g_mean is not None:
        flows.append(elementwise(b, lambda x, t: x * 0.0 + t * share, x, reshape(b, g_mean, shape), dtype=x.dtype))
    if g_variance is not None:
        vectors = [reshape(b, vector, shape) for vector in (mean, g_variance)]
        flows.append(elementwise(b, lambda x, m, t: (x - m) * t * (2 * share), x, *vectors, dtype=x.dtype))
    total = None
    for flow in flows:
        total = flow if total is None else elementwise(b, lambda x, y: x + y, total, flow)
    return total


def sum_gradients(
    x: np.ndarray, g: np.ndarray, mean: np.ndarray, total: np.ndarray, moment: np.ndarray, workspace: np.ndarray
) -> None:
    """Σ g into `total`, and Σ g · (x − mean) onto `moment`, of a group of channels of [N, C, positions]."""
    np.add.reduce(g, axis=(0, 2), out=total, dtype=total.dtype)
    for items, positions in blocks_of(x.shape):
        block = x[items, :, positions]
        centred, sums = scratch_of(workspace, block)
        np.subtract(block, mean[:, None], out=centred)
        moment += np.sum(np.vecdot(centred, g[items, :, positions], out=sums), axis=0)


def _factor(scale: np.ndarray, variance: np.ndarray, epsilon: float) -> np.ndarray:
    return scale / np.sqrt(variance + variance.dtype.type(epsilon))


def batch_norm(
    b: Builder,
    x: Value,
    scale: Value,
    bias: Value,
    running_mean: Value,
    running_variance: Value,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
) -> Value:
    """Batch normalisation of x [N, C, *S]; training takes the batch's statistics and lets the running ones follow."""
    return b.apply(BatchNorm(epsilon, momentum), x, scale, bias, running_mean, running_variance)


def with_frozen_statistics(graph: Graph, where: Callable[[Node], bool]) -> Graph:
    """The graph in which batch normalisation, where a test holds, keeps and uses its running statistics in training."""

    def frozen(node: Node) -> Node:
        if not isinstance(node.op, BatchNorm) or node.op.frozen or not where(node):
            return node
        return replace(node, op=replace(node.op, frozen=True))

    nodes = tuple(map(frozen, graph.nodes))
    return graph if nodes == graph.nodes else replace(graph, nodes=nodes)
