"""Layers: functions of tensors that make their own parameters in the model being traced.

Every layer takes a `name`. The names of its parameters begin with it (`conv1.weight`). A layer without a name is named
by its kind and a number (`conv0.weight`). Initialisers are PyTorch's defaults unless the layer says otherwise;
`weight_init` and `bias_init` replace them. Parameters have the element type of the input.
"""

from __future__ import annotations

import math

from foreplan.arguments import number_in, whole
from foreplan.errors import ShapeError
from foreplan.frontend.nn.functions import attention, join_heads, split_heads
from foreplan.frontend.nn.parameters import (
    Init,
    buffer,
    float_dtype,
    layer,
    parameter,
    uniform_fan_in,
    xavier_uniform,
)
from foreplan.frontend.nn.windows import Padding, PerAxis, pads_per_axis, per_axis
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import current
from foreplan.graph import DType, Normal
from foreplan.ops.conv import ops as convolution
from foreplan.ops.matmul import matmul
from foreplan.ops.norm import batch, rows
from foreplan.ops.window import Geometry


def linear(
    x: Tensor,
    features: int,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
) -> Tensor:
    """x·Wᵀ + b over the last axis: [..., in] → [..., features].

    `weight` is [features, in] and `bias` [features]; both are drawn from U(±1/√in).

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    inputs = x.shape[-1] if x.shape else 0
    with layer(name, "linear"):
        w, b = _weight_and_bias(x, (features, inputs), features if bias else None, weight_init, bias_init)
        y = current().wrap(matmul(current().at(), x.value, w.value, transpose_b=True))
        return y if b is None else y + b


def _weight_and_bias(
    x: Tensor, shape: tuple[int, ...], biases: int | None, weight_init: Init | None, bias_init: Init | None
) -> tuple[Tensor, Tensor | None]:
    """Parameters `weight` and, unless `biases` is None, `bias`. Both are drawn from U(±1/√n), n = weight[0].size."""
    default, dtype = uniform_fan_in(math.prod(shape[1:])), float_dtype(x)
    weight = parameter("weight", shape, default if weight_init is None else weight_init, dtype)
    if biases is None:
        return weight, None
    return weight, parameter("bias", biases, default if bias_init is None else bias_init, dtype)


def conv(
    x: Tensor,
    features: int,
    kernel: PerAxis,
    stride: PerAxis = 1,
    padding: Padding = 0,
    groups: int = 1,
    dilation: PerAxis = 1,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
) -> Tensor:
    """Convolution in one, two or three dimensions: [N, C, *S] → [N, features, *S'].

    Args:
        x: images, channels second.
        features: output channels.
        kernel: extent along each spatial axis; one number for all.
        stride: step along each spatial axis.
        padding: zeros on both sides of each axis: one number, one for each axis, or pairs (low, high). "valid" is no
            padding; "same" makes each output extent ⌈input / stride⌉.
        groups: number of equal groups of channels; each is convolved alone.
        dilation: distance between taps.
        bias: whether the layer has a bias.
        name: of the layer; `weight` is [features, C/groups, *kernel], `bias` [features].
        weight_init: U(±1/√fan_in) by default, fan_in = C/groups · taps.
        bias_init: the same by default.

    Raises:
        ShapeError: the groups do not divide the channels, or the kernel exceeds the padded input.
        UsageError: a size is not a whole number, or too small.
    """
    axes, groups = _axes_and_groups("conv", x, features, groups)
    taps, steps = per_axis("conv's kernel", kernel, axes), per_axis("conv's stride", stride, axes)
    gaps = per_axis("conv's dilation", dilation, axes)
    with layer(name, "conv"):
        shape = (features, x.shape[1] // groups, *taps)
        w, b = _weight_and_bias(x, shape, features if bias else None, weight_init, bias_init)
        pads = pads_per_axis("conv's padding", padding, x.shape[2:], taps, steps, gaps)
        added = None if b is None else b.value
        geometry: Geometry = {"strides": steps, "pads": pads, "dilations": gaps}
        y = convolution.conv(current().at(), x.value, w.value, added, groups=groups, **geometry)
    return current().wrap(y)


def _axes_and_groups(kind: str, x: Tensor, features: int, groups: int) -> tuple[int, int]:
    """The number of spatial axes and that of groups, which divide the channels."""
    axes, groups = x.ndim - 2, whole(f"{kind}'s groups", groups, 1)
    if axes < 1:
        raise ShapeError(f"{kind} needs images [N, C, *S] with at least one spatial axis, and got {x!r}")
    if x.shape[1] % groups or features % groups:
        raise ShapeError(f"{kind} of {x!r} to {features} channels: {groups} groups must divide both channels")
    return axes, groups


def conv_transpose(
    x: Tensor,
    features: int,
    kernel: PerAxis,
    stride: PerAxis = 1,
    padding: PerAxis = 0,
    output_padding: PerAxis = 0,
    groups: int = 1,
    dilation: PerAxis = 1,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
) -> Tensor:
    """Transposed convolution: [N, C, *S] → [N, features, *S'], S' = (S − 1)·stride − 2·padding + dilation·(kernel − 1)
    + output_padding + 1.

    `weight` is [C, features/groups, *kernel]; it and `bias` are drawn from U(±1/√(features/groups · taps)). The
    arguments are those of `conv`; padding is one number, or one for each axis.

    Raises:
        ShapeError: the groups do not divide the channels.
        UsageError: a size is not a whole number, or too small.
    """
    axes, groups = _axes_and_groups("conv_transpose", x, features, groups)
    kind = "conv_transpose's"
    taps, steps = per_axis(f"{kind} kernel", kernel, axes), per_axis(f"{kind} stride", stride, axes)
    gaps = per_axis(f"{kind} dilation", dilation, axes)
    extra = per_axis(f"{kind} output_padding", output_padding, axes, 0)
    pads = [(p, p) for p in per_axis(f"{kind} padding", padding, axes, 0)]
    with layer(name, "conv_transpose"):
        shape = (x.shape[1], features // groups, *taps)
        w, b = _weight_and_bias(x, shape, features if bias else None, weight_init, bias_init)
        added = None if b is None else b.value
        geometry: Geometry = {"strides": steps, "pads": pads, "dilations": gaps}
        y = convolution.conv_transpose(
            current().at(), x.value, w.value, added, groups=groups, output_padding=extra, **geometry
        )
    return current().wrap(y)


def _scale_and_bias(shape: int | tuple[int, ...], dtype: DType) -> tuple[Tensor, Tensor]:
    """The parameters `weight`, which begins at 1, and `bias`, which begins at 0."""
    return parameter("weight", shape, 1.0, dtype), parameter("bias", shape, 0.0, dtype)


def batch_norm(x: Tensor, momentum: float = 0.9, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Batch normalisation over all axes but the second (Ioffe and Szegedy 2015): [N, C, *S] → [N, C, *S].

    Training uses the batch's statistics and updates the buffers `running_mean` and `running_var` to momentum·old +
    (1 − momentum)·batch, as ONNX does; PyTorch's momentum is 1 minus this one. `weight` [C] begins at 1, `bias` [C]
    at 0.

    Raises:
        ShapeError: `x` has fewer than two axes.
        UsageError: the momentum is outside [0, 1], or epsilon is negative or infinite.
    """
    channels, dtype = _channels(x), float_dtype(x)
    with layer(name, "batch_norm"):
        scale, bias = _scale_and_bias(channels, dtype)
        mean = buffer("running_mean", channels, 0.0, dtype)
        var = buffer("running_var", channels, 1.0, dtype)
        b = current().at()
        kept = number_in("batch_norm's momentum", momentum, 0.0, math.nextafter(1.0, 2.0))
        op = batch.BatchNorm(epsilon=_epsilon(epsilon), momentum=kept)
        return current().wrap(b.apply(op, x.value, scale.value, bias.value, mean.value, var.value))


def layer_norm(x: Tensor, axis: int = -1, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Layer normalisation over the axes from `axis` to the last (Ba et al. 2016). The shape stays.

    `weight`, which begins at 1, and `bias`, which begins at 0, have the shape of these axes.
    """
    first, dtype = as_axis(axis, x.ndim), float_dtype(x)
    with layer(name, "layer_norm"):
        scale, bias = _scale_and_bias(x.shape[first:], dtype)
        y = rows.layer_norm(current().at(), x.value, scale.value, bias.value, axis=first, epsilon=_epsilon(epsilon))
        return current().wrap(y)


def rms_norm(x: Tensor, axis: int = -1, epsilon: float = 1e-6, name: str = "") -> Tensor:
    """x / √(mean(x²) + epsilon) · weight over the axes from `axis` to the last (Zhang and Sennrich 2019).

    `weight`, which begins at 1, has the shape of these axes.
    """
    first, dtype = as_axis(axis, x.ndim), float_dtype(x)
    with layer(name, "rms_norm"):
        scale = parameter("weight", x.shape[first:], 1.0, dtype)
        y = rows.rms_norm(current().at(), x.value, scale.value, axis=first, epsilon=_epsilon(epsilon))
        return current().wrap(y)


def group_norm(x: Tensor, groups: int, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Normalisation over groups of channels (Wu and He 2018): [N, C, *S] → [N, C, *S].

    `weight` [C] begins at 1, `bias` [C] at 0.

    Raises:
        ShapeError: the groups do not divide the channels.
        UsageError: `groups` is not a whole number of at least 1.
    """
    channels, dtype, groups = _channels(x), float_dtype(x), whole("group_norm's groups", groups, 1)
    if channels % groups:
        raise ShapeError(f"group_norm of {x!r}: {channels} channels do not make {groups} equal groups")
    with layer(name, "group_norm"):
        scale, bias = _scale_and_bias(channels, dtype)
        y = rows.group_norm(current().at(), x.value, groups, scale.value, bias.value, epsilon=_epsilon(epsilon))
        return current().wrap(y)


def _epsilon(given: float) -> float:
    return number_in("epsilon", given, 0.0, math.inf)


def _channels(x: Tensor) -> int:
    if x.ndim < 2:
        raise ShapeError(f"{x!r} has no channel axis; normalisation by channel needs [N, C, *S]")
    return x.shape[1]


def embedding(
    ids: Tensor,
    count: int,
    features: int,
    name: str = "",
    weight_init: Init | None = None,
    dtype: str = "float32",
) -> Tensor:
    """Rows of a table: integers [...] → [..., features]; `weight` is [count, features], drawn from N(0, 1).

    `nn.shared("<name>.weight")` returns the table again, for an output layer that is tied to it.
    """
    with layer(name, "embedding"):
        return parameter("weight", (count, features), Normal(1.0) if weight_init is None else weight_init, dtype)[ids]


def multi_head_attention(
    x: Tensor,
    heads: int,
    context: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    bias: bool = True,
    name: str = "",
) -> Tensor:
    """Multi-head attention (Vaswani et al. 2017): [B, T, D] → [B, T, D].

    Self-attention projects `x` by `in_proj` [3·D, D] to queries, keys and values, in this order. With a context
    [B, S, C], `q_proj` [D, D] makes the queries from `x`, and `kv_proj` [2·D, C] the keys and values from the context.
    `out_proj` [D, D] comes last. The weights of projections to heads are drawn by `xavier_uniform`; biases begin at 0.

    Args:
        x: the positions that attend.
        heads: number of heads; it divides D.
        context: the positions attended to; `x` by default.
        mask: added to the scores, or boolean (True: attend); broadcasts to [B, heads, T, S].
        causal: position t attends to positions up to t.
        bias: whether projections have a bias.
        name: of the layer.

    Raises:
        ShapeError: the heads do not divide D, or a tensor does not have three axes.
        UsageError: `heads` is not a whole number of at least 1.
    """
    width = x.shape[-1]
    with layer(name, "attention"):
        if context is None:
            init = xavier_uniform(width, 3 * width)
            q, k, v = split_heads(linear(x, 3 * width, bias, "in_proj", init, 0.0), heads, 3)
        else:
            (q,) = split_heads(linear(x, width, bias, "q_proj", xavier_uniform(width, width), 0.0), heads)
            init = xavier_uniform(context.shape[-1], 2 * width)
            k, v = split_heads(linear(context, 2 * width, bias, "kv_proj", init, 0.0), heads, 2)
        y = attention(q, k, v, mask, causal, heads_last=True)
        return linear(join_heads(y), width, bias, "out_proj", bias_init=0.0)
